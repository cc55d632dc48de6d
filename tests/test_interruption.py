"""What is interrupted leaves nothing running, loses nothing, and has the same result."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.read import Journal
from tests.support.programs import Program
from tests.support.waiting import LIMIT_S, looks, under_load

MARK = 'FREETRAIN_INTERRUPTION_TEST'
CTRL_C_S = 10.0  # what the demonstration promises
EPOCHS = 2


class Demo:
    """``python -m workflows.digits`` on two nodes, as a shell starts it, held up to its end."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.out = folder / 'out'
        self._go = folder / 'go'
        holes = folder / 'holes.csv'
        holes.write_text('start_s,end_s,node\n0,1000,a\n0,1000,b\n')
        self.mark = uuid.uuid4().hex
        self.begun_at = time.time()
        self.output = folder / f'output-{self.mark}'
        with self.output.open('w') as output:
            options = ['--idle', holes, '--nodes', '2', '--epochs', str(EPOCHS), *more]
            self.process = Program(
                [sys.executable, '-m', 'tests.support.held', self._go, '--out', self.out, *options],
                more_env={MARK: self.mark},
                cwd=folder,
                process_group=0,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def may_end(self) -> None:
        self._go.touch()

    def wait_for_progress(self) -> None:
        """Both trainers have committed a checkpoint in this run, and have gone on since."""
        self._until(lambda: self._saved_since(self.begun_at) == {'cnn', 'mlp'})
        since = time.time()
        self._until(lambda: 'cnn' in self._reported_since(since))

    def _history(self) -> History:
        with contextlib.suppress(BadInput):
            return Journal(self.out / 'holes' / 'ledger.journal').history()
        return History()

    def _saved_since(self, at: float) -> set[str]:
        saved = [c for run in self._history().runs for c in run.checkpoints]
        return {checkpoint.trainer for checkpoint in saved if checkpoint.at > at}

    def _reported_since(self, at: float) -> set[str]:
        seen = [fragment.seen for fragment in self._history().fragments]
        return {report.trainer for report in seen if report and report.at > at}

    def _until(self, condition: Callable[[], bool]) -> None:
        for _ in looks():
            if condition():
                return
            assert self.process.poll() is None, self.output.read_text()
        raise AssertionError(self.output.read_text())

    def left(self) -> list[psutil.Process]:
        """Processes of this run that are still there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


@pytest.mark.long
def test_the_same_command_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """It ends with the weights of an undisturbed run; tests/test_calls.py kills a program."""
    first = Demo(tmp_path)
    demos = [first]
    try:
        first.wait_for_progress()
        assert len(first.left()) > 4
        begun = time.monotonic()
        os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does
        status = first.process.wait(LIMIT_S)
        for _ in looks():
            if not (left := first.left()):
                break
            assert time.monotonic() - begun < under_load(CTRL_C_S), [p.cmdline() for p in left]
        said = first.output.read_text()
        assert status == 130, said
        assert 'Nothing is lost: the same command continues' in said
        assert 'Traceback' not in said

        demos.append(last := Demo(tmp_path, '--resume', 'require'))
        last.may_end()
        assert last.process.wait(LIMIT_S) == 0, last.output.read_text()
        assert not last.left()
    finally:
        for demo in demos:
            demo.kill()
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())['trainers']
    for trainer in summary.values():
        assert trainer['weights_equal']
        assert trainer['samples'] == trainer['samples_expected']
        assert trainer['fragments'] >= 1
