"""A test machine with LSF, and the package that adds LSF, as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_tests import Rehearsal, rehearsal
from tests.support.lsf_commands import NAMES

PACKAGE = Path(__file__).resolve().parents[1] / 'sites' / 'lsf_example'
NODES: dict[str, dict[str, Any]] = {f'host{number}': {} for number in range(4)}


@pytest.fixture
def lsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Four idle hosts; the commands are in PATH, and the package can be found as if installed."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield from rehearsal(tmp_path / 'lsf', monkeypatch, 'lsf_commands', NAMES, NODES)
