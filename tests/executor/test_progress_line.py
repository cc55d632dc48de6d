"""The line on a terminal that says how far the trainers are, written off the event loop."""

import io
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parsl_freetrain import LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.executor import off_loop
from parsl_freetrain.executor.progress import ProgressLine
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr('sys.stderr', out)
    monkeypatch.setenv('COLUMNS', '120')
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):
        freetrain_app(max_nodes=1, total_epochs=8)(fit)(pause_s=0.02).result(LIMIT_S)
    hint, _, lines = re.sub('.* was never rehearsed: .*\n', '', out.getvalue()).partition('\n')
    assert hint.startswith('freetrain watch --ledger ') and hint.endswith('shows more.')
    assert 'fit running on 1 node: ' in lines and ' of 768 samples, loss ' in lines
    assert lines.endswith('1 finished\n') and lines.count('\n') == 1


def test_a_line_written_at_once_is_followed_by_others_and_files_get_none(tmp_path: Path) -> None:
    """Nor does standard error that is closed."""
    terminal, file, now = Terminal(), io.StringIO(), [0.0]
    records = cast(Any, {'a': SimpleNamespace(future=TrainingFuture('a'))})
    for out in (terminal, file, None):
        line = ProgressLine(out, records, tmp_path, lambda: now[0])
        line.take(ev.TrainerSubmitted(0.0, Trainer('a', 1, 1, 10)))
        for now[0] in (1.0, 2.0):
            line.flush()
        line.take(ev.RunEnded(2.0, 'shutdown'))
    assert terminal.getvalue().count('a waiting: 0 samples') == 3
    assert file.getvalue() == ''


def test_output_stuck_until_its_queue_is_full_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, 'LAST_S', 0.0)
    goes_on = threading.Event()
    with off_loop.beside_this_thread():
        off_loop.run(goes_on.wait)
        while off_loop.run(int):
            pass
    goes_on.set()
    wait_until(lambda: all(one.name != 'FreeTrain-Output' for one in threading.enumerate()))
