"""Whatever is interrupted or killed, nothing is left running, nothing is lost, and the result is the same."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

from parsl_freetrain.app import TrainingFuture, freetrain_app
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.training.export import same_weights
from tests.support.processes import KINDS, Started, victims
from tests.support.training import fit, freetrain

pytestmark = pytest.mark.slow

MARK = 'FREETRAIN_INTERRUPTION_TEST'
CTRL_C_S = 10.0    # what the demonstration promises
ORPHANED_S = 20.0  # in which everything notices that the submitting process was killed
LONG_S = 150.0
EPOCHS = 12
STEP_S = 0.015   # each of a batch's four turns in the holes waits so long: an interruption has to come before the end
KILLED_EPOCHS = 30   # of 12 batches of 0.6 s or more while it is being killed: it outlasts the blows by far


class Demo:
    """``python -m workflows.digits`` on two nodes that stay, as a shell would start it: in a process group of its own."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.out = folder / 'out'
        holes = folder / 'holes.csv'
        holes.write_text('start_s,end_s,node\n0,1000,a\n0,1000,b\n')
        self.mark = uuid.uuid4().hex
        self.begun_at = time.time()
        self.output = folder / f'output-{self.mark}'
        with self.output.open('w') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'workflows.digits', '--out', str(self.out), '--idle', str(holes), '--nodes', '2',
                 '--epochs', str(EPOCHS), '--step-s', str(STEP_S), *more],
                env={**os.environ, MARK: self.mark, 'PYTHONPATH': os.getcwd()}, cwd=folder, process_group=0,
                stdout=output, stderr=subprocess.STDOUT,
                # A test run in the background ignores Ctrl-C, and its children would too.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def wait_for_progress(self) -> None:
        """Both trainers have committed a checkpoint in this run, and have gone on since."""
        self._until(lambda: self._trainers('checkpoints', 'at > ?') == {'cnn', 'mlp'})
        since = time.time()
        self._until(lambda: 'cnn' in self._trainers('progress', 'at > ?', since))

    def _trainers(self, table: str, condition: str, since: float | None = None) -> set[str]:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(
                f'file:{self.out}/holes/ledger.sqlite?mode=ro', uri=True)) as ledger:
            return {name for (name,) in ledger.execute(
                f'SELECT DISTINCT trainer FROM {table} WHERE {condition}', (since or self.begun_at,))}
        return set()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def left(self) -> list[psutil.Process]:
        """Processes of this run that are still there."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()


def test_ctrl_c_and_a_killed_submitting_process_lose_nothing(tmp_path: Path) -> None:
    """The same command goes on after each, and ends with the weights of an undisturbed run."""
    demos: list[Demo] = []

    def run(*options: str) -> Demo:
        demos.append(Demo(tmp_path, *options))
        return demos[-1]

    try:
        killed = run()
        killed.wait_for_progress()
        assert len(killed.left()) > 4
        killed.process.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        killed.process.wait()
        while left := killed.left():
            assert time.monotonic() - begun < ORPHANED_S, [p.cmdline() for p in left]
            time.sleep(0.05)
        print(f'gone {time.monotonic() - begun:.1f} s after SIGKILL')

        interrupted = run('--resume', 'require')
        interrupted.wait_for_progress()
        begun = time.monotonic()
        os.killpg(interrupted.process.pid, signal.SIGINT)   # as a terminal does
        status = interrupted.process.wait(60)
        took = time.monotonic() - begun
        print(f'ended {took:.1f} s after Ctrl-C')
        said = interrupted.output.read_text()
        assert status == 130, said
        assert took <= CTRL_C_S, said
        assert not interrupted.left()
        assert 'Nothing is lost: the same command continues' in said
        assert 'Traceback' not in said

        last = run('--resume', 'require')
        assert last.process.wait(LONG_S) == 0, last.output.read_text()
        assert not last.left()
    finally:
        for demo in demos:
            demo.kill()
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())['trainers']
    for trainer in summary.values():
        assert trainer['weights_equal']
        assert trainer['samples'] == trainer['samples_expected']
        assert trainer['fragments'] >= 1


def rampage(future: TrainingFuture, started: Started, seed: int) -> list[str]:
    """Kill two things of each kind that a running training consists of, at random; what they were."""
    draw = random.Random(seed)
    killed: list[str] = []
    for kind in draw.sample(sorted(KINDS) * 2, 2 * len(KINDS)):
        before = future.progress().samples
        pause_s = draw.uniform(0.0, 2.0)
        deadline = time.monotonic() + LONG_S
        while not future.done() and future.progress().samples <= before:   # it has recovered from the last one
            assert time.monotonic() < deadline, f'no progress any more after {killed}'
            time.sleep(0.02)
        time.sleep(pause_s)
        while not future.done():
            if found := victims(kind, started.processes()):   # between two fragments there may be none
                with contextlib.suppress(psutil.NoSuchProcess):
                    draw.choice(found).kill()
                    killed.append(kind)
                    break
            assert time.monotonic() < deadline, f'nothing left to kill after {killed}'
            time.sleep(0.02)
    return killed


def test_kills_at_random_do_not_change_the_result(tmp_path: Path) -> None:
    """SIGKILL to ranks, warm parents, managers and blocks while a training runs on up to three nodes; a later run ends it."""
    settings: dict[str, Any] = {'total_epochs': KILLED_EPOCHS, 'scaling': {1: 1.0, 2: 1.9, 4: 3.5}, 'checkpoint_every_s': 0.5, 'shards': 4,
                                'rescale_up_s': 0.1, 'rescale_down_s': 0.1}
    trainer = freetrain_app(max_nodes=3, **settings)(fit)
    started = Started()
    with freetrain(tmp_path / 'chaos', LocalSite(nodes=3, poll_s=0.2), hang_s=4.0, heartbeat_period=1, heartbeat_threshold=4):
        future = trainer(pause_s=0.3)   # far too slow to end before the last kill
        killed = rampage(future, started, seed=2)
        print(f'killed {killed}')
        assert sorted(killed) == sorted(2 * list(KINDS)), 'the training was over too soon'
        assert future.progress().preempted >= 3
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(LONG_S)
    assert future.checkpoint is not None
    assert 0 < future.checkpoint.samples < KILLED_EPOCHS * 96
    with freetrain(tmp_path / 'chaos', LocalSite(nodes=2, poll_s=0.2), resume='require'):
        result = trainer().result(LONG_S)
    with freetrain(tmp_path / 'alone', LocalSite(nodes=1, poll_s=0.2)):
        alone = freetrain_app(max_nodes=1, **settings)(fit)().result(LONG_S)
    assert result.samples == alone.samples == KILLED_EPOCHS * 96
    assert same_weights(result, alone)
