"""A fork server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import running_fork_server


@pytest.fixture(scope='session')
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkClient]:
    """A fork server that has imported torch."""
    with running_fork_server(tmp_path_factory.mktemp('fork_server')) as parent:
        yield parent
