"""A fork server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parsl_freetrain.training.process.fork_client import WarmParent
from tests.support.ranks import warm_parent


@pytest.fixture(scope='session')
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmParent]:
    """A fork server that has imported torch."""
    with warm_parent(tmp_path_factory.mktemp('warm')) as parent:
        yield parent
