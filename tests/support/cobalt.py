"""A test machine with Cobalt, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch_tests import Rehearsal, rehearsal
from tests.support.cobalt_commands import NAMES

NODES = {
    f'nid{number:05}': {'has': {'mcdram': 'cache', 'numa': 'quad'}} for number in range(20, 24)
}


@pytest.fixture
def cobalt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle nodes; the machine's commands come first in PATH."""
    yield from rehearsal(tmp_path / 'cobalt', monkeypatch, 'cobalt_commands', NAMES, NODES)
