"""No job starts later than a stop takes, between the jobs and preemptible."""

from dataclasses import replace
from statistics import median

import pytest

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import KILL_WAIT_S, MODES, Outcome, side_by_side
from tests.slurm.mix import untidy
from tests.support import template
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm

# Half of the commands of 'make delay', which cost much of the test's processor time.
LESS_OFTEN = {'poll_s': 1.0, 'waiting_poll_s': 0.5}
# A reservation would take a minute more; 'make delay' has one, and more nodes and jobs.
NODES = 2
MIX = replace(untidy(6, NODES, 6, 30.0, 10.0), reserved=None)


@pytest.fixture(scope='module')
def outcomes(has_slurm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The mix twice without FreeTrain and once in each mode, at once; blocks import no torch."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in template.for_nodes().items():
            patch.setenv(variable, value)
        filled = {mode: {**settings, **LESS_OFTEN} for mode, settings in MODES.items()}
        runs = {'alone': None, 'again': None, **filled}
        return side_by_side(runs, MIX, NODES, tmp_path_factory.mktemp('delay'))


@pytest.mark.parametrize('mode', MODES)
def test_no_job_starts_later_than_a_stop_takes(outcomes: dict[str, Outcome], mode: str) -> None:
    alone = [outcomes['alone'], outcomes['again']]
    delays, noise = delays_s(alone, outcomes[mode]), scatter_s(*alone)
    print(f'{mode}: delays {delays} s, without FreeTrain {noise:g} s apart')
    idle = idle_of(outcomes[mode])
    print(idle, outcomes[mode].commands)
    assert outcomes[mode].blocks
    assert median(delays) <= under_load(10.0) + KILL_WAIT_S + noise
    assert max(delays) <= under_load(10.0) + KILL_WAIT_S + noise
    # Seconds of start-up weigh much in holes of a minute, and more on a busy computer.
    assert idle.share_of_long > 0.2 / under_load(1.0)
