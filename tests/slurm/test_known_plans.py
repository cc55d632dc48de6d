"""Nobody is delayed at all where the scheduler's plans come true: blocks fit between the jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import MODES, ROUNDING_S, TICK_S, side_by_side
from tests.slurm.mix import Mix, Ordinary
from tests.support.slurm import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

NODES = 4
# Two nodes stay idle until the wide job's turn. The first job ends 5 s before its limit; nobody
# waits for the end of the wide one.
MIX = Mix((Ordinary(0.0, 2, 2, 115.0), Ordinary(0.0, NODES, 1, 5.0)))


@pytest.mark.usefixtures('nodes_share_a_template')
def test_jobs_whose_plans_are_known_start_as_without_blocks(
    slurm_cluster: Cluster, tmp_path: Path
) -> None:
    outcomes = side_by_side(
        {'alone': None, 'again': None, 'filled': MODES['backfill']},
        MIX,
        NODES,
        tmp_path,
        blocks_first=False,
    )
    alone = [outcomes['alone'], outcomes['again']]
    delays, noise = delays_s(alone, outcomes['filled']), scatter_s(*alone)
    print(f'delays {delays} s, without FreeTrain {noise:g} s apart; {idle_of(outcomes["filled"])}')
    assert outcomes['filled'].blocks
    assert max(delays) <= TICK_S + ROUNDING_S + noise
