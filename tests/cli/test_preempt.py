"""``freetrain preempt`` on a training that runs, from another process and from here."""

import json
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.journal.read import Journal
from tests.support.programs import FREETRAIN, run_to_end
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until


def wait_for(future: TrainingFuture, fragment: int) -> None:
    """This fragment trains."""
    wait_until(lambda: future.progress().fragments >= fragment)
    since = future.progress().samples
    wait_until(lambda: future.progress().samples > since + 96)


def test_a_rehearsed_preemption_with_and_without_grace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = Checkpoints(every_s=1000.0)
    trainer = freetrain_app(max_nodes=1, total_epochs=100_000, checkpoints=keep)(fit)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=1.0) as executor:
        future = trainer(pause_s=0.01)
        ledger = ['--ledger', str(executor.ledger_path)]
        wait_for(future, 1)
        noticed = run_to_end([*FREETRAIN, 'preempt', 'fit', '--grace', '60', *ledger])
        assert (noticed.returncode, noticed.stderr) == (0, '')
        assert "Fragment 1 of trainer 'fit' on 1 node has its notice" in noticed.stdout
        wait_for(future, 2)
        assert main(['preempt', 'fit', '--json', *ledger]) == 0
        assert json.loads(capsys.readouterr().out) == {
            'trainer': 'fit',
            'grace_s': 0.0,
            'answer': "Fragment 2 of trainer 'fit' on 1 node is being killed.",
        }
        wait_for(future, 3)
        absent = str(tmp_path / 'no')
        for arguments, words in (
            (['cnn', *ledger], "no trainer 'cnn' in this run; it has 'fit'"),
            (['x', '--grace', '-1'], '--grace is -1'),
            (['x', '--ledger', absent], 'no run with the ledger'),
        ):
            assert main(['preempt', *arguments]) == 2
            said = capsys.readouterr()
            assert said.out == '' and words in said.err and said.err.count('\n') == 1
    first, second, third = Journal(executor.ledger_path).history().fragments[:3]
    assert (first.ending, first.samples) == ('stopped', first.reached)  # it had time to save
    assert first.samples
    assert second.ending == 'preempted'
    assert second.error == 'a rehearsed preemption'
    assert third.launched.samples == first.samples
