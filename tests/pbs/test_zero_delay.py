"""No job starts later than a stop takes on a real PBS, between the jobs and preemptible."""

from dataclasses import replace

import pytest

from tests.pbs.groups import MODES, groups
from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import side_by_side
from tests.slurm.mix import untidy
from tests.support.openpbs import why_not
from tests.support.waiting import under_load

pytestmark = [pytest.mark.pbs, pytest.mark.long]

NODES = 2
MIX = replace(untidy(6, NODES, 6, 30.0, 10.0), reserved=None)  # which would take a minute more
STOP_S = 10.0  # at most one poll, the stop of a step and PBS's own end of a job


def test_no_job_starts_later_than_a_stop_takes(tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp('delay')
    runs = {'alone': None, 'again': None, **MODES}
    with groups(tuple(runs), NODES) as machines:
        found = side_by_side(runs, MIX, NODES, folder, machines=machines)
    alone = [found['alone'], found['again']]
    noise = scatter_s(*alone)
    for mode in MODES:
        delays = delays_s(alone, found[mode])
        print(f'{mode}: delays {delays} s, without FreeTrain {noise:g} s apart')
        print(idle_of(found[mode]), found[mode].commands)
        assert found[mode].trained  # PBS says no nodes of a block that it queued again
        assert max(delays) <= under_load(STOP_S) + noise
