"""The guide to rehearsing a preemption, on a training that runs on this computer."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, LocalSite, TrainingFuture, freetrain_app
from parsl_freetrain.cli.main import main
from tests.support.pages import ROOT, as_shown, commands
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until


def trains(future: TrainingFuture, fragment: int) -> None:
    """Wait until this fragment trains."""
    before = future.progress().samples
    wait_until(
        lambda: future.progress().fragments >= fragment and future.progress().samples > before
    )


def test_the_guide_does_what_it_shows(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = freetrain_app(max_nodes=1, total_epochs=100_000, checkpoints=Checkpoints(every_s=0.5))(
        fit
    )
    with freetrain(run_dir, LocalSite(nodes=1, poll_s=0.2), stop_grace_s=2.0):
        future = app(pause_s=0.01, trainer_name='digits')
        fragment = 1
        for command in commands(ROOT / 'docs' / 'guides' / 'preemption.md'):
            trains(future, fragment)
            capsys.readouterr()
            assert command.words[0] == 'freetrain'
            assert main(command.words[1:]) == 0, str(command)
            if command.shown:
                assert as_shown(command.shown, capsys.readouterr().out, loosely=False), str(command)
            fragment += command.words[1] == 'preempt'
        assert fragment == 3
        assert future.progress().preempted == 1
