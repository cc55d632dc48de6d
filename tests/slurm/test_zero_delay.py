"""No job starts later than a stop takes: the same untidy mix of jobs on a real cluster, without
FreeTrain and with it filling every hole, between the jobs and preemptible.
"""

from __future__ import annotations

from statistics import median

import pytest

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import KILL_WAIT_S, MODES, Outcome, side_by_side
from tests.slurm.mix import untidy
from tests.support import template
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm

NODES = 4
# Half of the commands of 'make delay', which cost much of the test's processor time.
LESS_OFTEN = {'poll_s': 1.0, 'waiting_poll_s': 0.5}
MIX = untidy(6, NODES, 7, 120.0, 20.0)


@pytest.fixture(scope='module')
def outcomes(
    slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """The mix twice without FreeTrain, to see what the scheduler does by itself, and once with it
    in each mode; all at the same time. Blocks import no torch: that would take processors from
    the schedulers, on this computer alone.
    """
    folder = tmp_path_factory.mktemp('delay')
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in template.for_nodes().items():
            patch.setenv(variable, value)
        filled = {mode: {**settings, **LESS_OFTEN} for mode, settings in MODES.items()}
        return side_by_side({'alone': None, 'again': None, **filled}, MIX, NODES, folder)


@pytest.mark.parametrize('mode', MODES)
def test_no_job_starts_later_than_a_stop_takes(outcomes: dict[str, Outcome], mode: str) -> None:
    alone = [outcomes['alone'], outcomes['again']]
    delays, noise = delays_s(alone, outcomes[mode]), scatter_s(*alone)
    print(f'{mode}: delays {delays} s, without FreeTrain {noise:g} s apart')
    print(idle_of(outcomes[mode]), outcomes[mode].commands)
    assert outcomes[mode].blocks
    assert median(delays) <= under_load(10.0) + KILL_WAIT_S + noise
    assert max(delays) <= under_load(10.0) + KILL_WAIT_S + noise


@pytest.mark.parametrize('mode', MODES)
def test_idle_time_becomes_training(outcomes: dict[str, Outcome], mode: str) -> None:
    # Seconds of start-up weigh much in holes of a minute, and more on a busy computer.
    assert idle_of(outcomes[mode]).share_of_long > 0.2 / under_load(1.0)
