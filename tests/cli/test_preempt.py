"""``freetrain preempt`` from another process, on a training that runs."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from parsl_freetrain import Checkpoints, LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.support.programs import run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S


def freetrain_preempt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end([sys.executable, '-m', 'parsl_freetrain.cli.main', 'preempt', *arguments])


def wait_for(future: TrainingFuture, fragments: int) -> None:
    """A fragment of this number trains, and has saved."""
    end, since = time.monotonic() + LIMIT_S, None
    while (
        future.progress().fragments < fragments
        or since is None
        or future.progress().samples <= since + 96
    ):
        if future.progress().fragments >= fragments and since is None:
            since = future.progress().samples
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_a_rehearsed_preemption_with_and_without_grace(tmp_path: Path) -> None:
    keep = Checkpoints(every_s=1000.0)
    trainer = freetrain_app(max_nodes=1, total_epochs=100_000, checkpoints=keep)(fit)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=1.0) as executor:
        future = trainer(pause_s=0.01)
        ledger = ['--ledger', str(executor.ledger_path)]
        wait_for(future, 1)
        noticed = freetrain_preempt('fit', '--grace', '60', *ledger)
        assert (noticed.returncode, noticed.stderr) == (0, '')
        assert "Fragment 1 of trainer 'fit' on 1 node has its notice" in noticed.stdout
        wait_for(future, 2)
        killed = freetrain_preempt('fit', '--json', *ledger)
        assert json.loads(killed.stdout) == {
            'trainer': 'fit',
            'grace_s': 0.0,
            'answer': "Fragment 2 of trainer 'fit' on 1 node is being killed.",
        }
        wait_for(future, 3)
        unknown = freetrain_preempt('cnn', *ledger)
        assert (unknown.returncode, unknown.stdout) == (2, '')
        assert "no trainer 'cnn' in this run; it has 'fit'" in unknown.stderr
    first, second, third = Journal(executor.ledger_path).history().fragments[:3]
    assert (first.ending, first.samples) == ('stopped', first.reached)  # it had time to save
    assert first.samples
    assert second.ending == 'preempted'
    assert second.error == 'a rehearsed preemption'
    assert third.launched.samples == first.samples


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    absent = str(tmp_path / 'no')
    for arguments, words in (
        (['x', '--grace', '-1'], '--grace is -1'),
        (['x', '--ledger', absent], 'no run with the ledger'),
    ):
        done = freetrain_preempt(*arguments)
        assert done.returncode == 2
        [sentence] = done.stderr.splitlines()
        assert words in sentence
