"""The line on a terminal that says how far the trainers are."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parsl_freetrain import LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.executor.progress import ProgressLine
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize('terminal', [None, True, False])
def test_a_terminal_gets_one_line_and_anything_else_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool | None
) -> None:
    """None: standard error is closed."""
    out = None if terminal is None else Terminal() if terminal else io.StringIO()
    monkeypatch.setattr('sys.stderr', out)
    monkeypatch.setenv('COLUMNS', '120')
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):
        freetrain_app(max_nodes=1, total_epochs=20)(fit)(pause_s=0.01).result(LIMIT_S)
    said = '' if out is None else out.getvalue()
    if not terminal:
        assert said == ''
        return
    hint, _, lines = re.sub('.* was never rehearsed: .*\n', '', said).partition('\n')
    assert hint.startswith('freetrain watch --ledger ') and hint.endswith('shows more.')
    assert 'fit running on 1 node: ' in lines and ' of 1,920 samples, loss ' in lines
    assert lines.endswith('1 finished\n') and lines.count('\n') == 1


def test_a_line_that_is_written_at_once_is_followed_by_others(tmp_path: Path) -> None:
    out, now = Terminal(), [0.0]
    records = cast(Any, {'a': SimpleNamespace(future=TrainingFuture('a'))})
    line = ProgressLine(out, records, tmp_path, lambda: now[0])
    line.take(ev.TrainerSubmitted(0.0, Trainer('a', 1, 1, 10)))
    for now[0] in (1.0, 2.0):
        line.flush()
    assert out.getvalue().count('a waiting: 0 samples') == 2
