"""Trainings on a real Slurm cluster: preempted, with a dead node, and while the
scheduler is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import Checkpoints, Scaling, TrainingFuture, freetrain_app
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.loop.context import FragmentContext
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S

pytestmark = pytest.mark.slurm


def until_training(future: TrainingFuture, samples: int = 0) -> None:
    while future.progress().samples <= samples:
        assert not future.done()
        threading.Event().wait(0.05)


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_a_training_goes_on_while_the_scheduler_is_restarted(
    slurm: Cluster, tmp_path: Path
) -> None:
    trainer = freetrain_app(max_nodes=2, total_epochs=12, scaling=Scaling(rate={1: 1.0, 2: 1.9}))(
        fit
    )
    site = slurm_site(command_s=5.0, longest_backoff_s=1.0)
    with freetrain(tmp_path, site, address='127.0.0.1') as executor:
        future = trainer(pause_s=0.03)
        until_training(future)
        slurm.stop_scheduler()
        try:
            until_training(future, future.progress().samples)
        finally:
            slurm.start_scheduler()
        assert future.result(LIMIT_S).samples == 12 * 96
        assert future.progress().preempted == 0
    with Journal(executor.ledger_path) as ledger:
        assert {node.name for node in ledger.history().nodes} <= {
            'node01',
            'node02',
            'node03',
            'node04',
        }


def test_a_preempted_block_loses_no_step(slurm: Cluster, tmp_path: Path) -> None:
    """A wide job takes the nodes; the fragment writes its checkpoint in the grace time, and the
    next one repeats nothing.
    """
    trainer = freetrain_app(max_nodes=1, total_epochs=60, checkpoints=Checkpoints(every_s=1000.0))(
        fit
    )
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


def held_fit(ctx: FragmentContext, go: str) -> None:
    """Does not get beyond its first half before there is the file ``go``."""
    loop = ctx.loop

    def held(*args: Any, **options: Any) -> Iterator[Any]:
        for batch in loop(*args, **options):
            while ctx.samples >= 20 * 96 and not Path(go).exists():
                time.sleep(0.05)
            yield batch

    ctx.loop = held  # type: ignore[method-assign]
    fit(ctx, pause_s=0.02)


@pytest.mark.long
def test_a_node_that_crashes_costs_no_more_than_the_work_since_the_last_checkpoint(
    slurm: Cluster, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(every_s=1.0)
    trainer = freetrain_app(max_nodes=1, total_epochs=40, checkpoints=checkpoints)(held_fit)
    go = tmp_path / 'go'
    with freetrain(
        tmp_path, slurm_site(), address='127.0.0.1', heartbeat_period=1, heartbeat_threshold=4
    ) as executor:
        future = trainer(str(go))
        until_training(future)
        with Journal(executor.ledger_path) as ledger:
            history = ledger.history()
        node = {node.node: node.name for node in history.nodes}[history.fragments[-1].nodes[0]]
        slurm.kill_node(node)
        go.touch()
        try:
            assert future.result(LIMIT_S).samples == 40 * 96
            assert future.progress().fragments >= 2
        finally:
            slurm.start_node(node)
