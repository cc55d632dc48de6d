"""A test machine with PBS, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch_tests import Rehearsal, rehearsal
from tests.support.pbs_commands import NAMES

NODES = {f'x{number:04}': {'has': {'ngpus': 2, 'system': 'rehearsal'}} for number in range(1, 5)}


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle nodes; the machine's commands come first in PATH."""
    yield from rehearsal(tmp_path / 'pbs', monkeypatch, 'pbs_commands', NAMES, NODES)
