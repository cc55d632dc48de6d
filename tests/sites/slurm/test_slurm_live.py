"""A preempted training on a real Slurm cluster; slurm/test_whole_training.py has dead nodes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, TrainingFuture, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slurm


def until_training(future: TrainingFuture) -> None:
    while not future.progress().samples:
        assert not future.done()
        threading.Event().wait(0.05)


def test_a_preempted_block_loses_no_step(slurm: Cluster, tmp_path: Path) -> None:
    """A wide job takes the nodes; the checkpoint comes in the grace time, nothing is repeated."""
    trainer = freetrain_app(max_nodes=1, total_epochs=60, checkpoints=Checkpoints(every_s=1e3))(fit)
    site = slurm_site('scavenger', mode='preemptible')
    with freetrain(tmp_path, site, address='127.0.0.1') as executor:
        future = trainer(pause_s=0.02)
        until_training(future)
        wide = slurm.submit('--nodes=4', '--time=1', '--partition=batch', seconds=2)
        slurm.wait(lambda: slurm.state(wide) == 'COMPLETED')
        assert future.result(LIMIT_S).samples == 60 * 96
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    fragments = history.fragments
    assert len(fragments) >= 2
    assert fragments[0].ending == 'stopped'
    assert fragments[0].samples == fragments[0].reached
