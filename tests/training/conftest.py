"""A warm parent for the tests of this folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest

from parsl_freetrain.training.warm import WarmParent


@pytest.fixture(scope='session')
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    """A warm parent that has torch imported."""
    parent = WarmParent.start(f'tests-{secrets.token_hex(8)}', os.getpid(), str(tmp_path_factory.mktemp('warm') / 'warm.log'))
    try:
        parent.wait_ready(120)
        yield parent
    finally:
        parent.stop()
