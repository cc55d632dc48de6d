"""No job is delayed: the same ordinary jobs on a real cluster, without FreeTrain and with it
filling every hole.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import Outcome, side_by_side
from tests.slurm.mix import arriving, known
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NODES = 4
TICK_S = 2.0  # bf_interval of the cluster
ROUNDING_S = 1.0  # Slurm tells times in whole seconds
GIVING_BACK_S = (
    10.0 + 5.0
)  # GraceTime and KillWait of the cluster: what a preempted job may take at most

QUICK: dict[str, Any] = {'poll_s': 1.0, 'submit_every_s': 0.0, 'start_s': 3.0, 'ending_s': 3.0}
BETWEEN: dict[str, Any] = {**QUICK, 'partition': 'batch', 'margin_s': 5.0}
PREEMPTIBLE: dict[str, Any] = {**QUICK, 'partition': 'scavenger', 'mode': 'preemptible'}


@pytest.fixture(scope='module')
def outcomes(
    slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """Each mix twice without FreeTrain, to see what the scheduler does by itself, and once with it;
    all at the same time.
    """
    folder = tmp_path_factory.mktemp('delay')
    planned, unforeseen = known(730, NODES, 3, 2), arriving(8, NODES, 9, 150.0, 30.0)
    assert max(job.nodes for job in planned) == max(job.nodes for job in unforeseen) == NODES
    return side_by_side(
        {
            'known-alone-1': (planned, None),
            'known-alone-2': (planned, None),
            'known-filled': (planned, BETWEEN),
            'arriving-alone-1': (unforeseen, None),
            'arriving-alone-2': (unforeseen, None),
            'arriving-filled': (unforeseen, PREEMPTIBLE),
        },
        NODES,
        folder,
    )


def test_blocks_between_other_jobs_delay_none_of_them(outcomes: dict[str, Outcome]) -> None:
    alone = [outcomes['known-alone-1'], outcomes['known-alone-2']]
    delays, noise = delays_s(alone, outcomes['known-filled']), scatter_s(*alone)
    print(
        f'delays {delays} s, without FreeTrain {noise:g} s apart; '
        f'{idle_of(outcomes["known-filled"])}'
    )
    assert outcomes['known-filled'].blocks
    assert max(delays) <= TICK_S + ROUNDING_S + noise


def test_preemptible_blocks_are_gone_within_the_grace_time(outcomes: dict[str, Outcome]) -> None:
    alone = [outcomes['arriving-alone-1'], outcomes['arriving-alone-2']]
    delays, noise = delays_s(alone, outcomes['arriving-filled']), scatter_s(*alone)
    print(
        f'delays {delays} s, without FreeTrain {noise:g} s apart; '
        f'{idle_of(outcomes["arriving-filled"])}'
    )
    assert outcomes['arriving-filled'].blocks
    assert max(delays) <= TICK_S + ROUNDING_S + noise + GIVING_BACK_S


@pytest.mark.parametrize('name', ['known-filled', 'arriving-filled'])
def test_idle_time_becomes_training(outcomes: dict[str, Outcome], name: str) -> None:
    # Seconds of start-up weigh much in holes of a minute: a tenth on an idle computer, less on a
    # busy one, where nodes start later.
    assert idle_of(outcomes[name]).share > 0.3 / under_load(1.0)
