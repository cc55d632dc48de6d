"""What a real server does not do on demand (see test_openpbs.py): time that has gone by, answers
that are no answers, a scheduler that hangs, a block that the scheduler shrinks, and HPE's launcher.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.pbspro import PbsSite
from tests.sites.batch_blocks import QUICK, Blocks
from tests.support.batch_tests import Rehearsal

Make = Callable[..., Blocks]


def test_the_scheduler_shrinks_a_block_and_the_block_asks_how_long_it_has(
    pbs: Rehearsal, blocks: Make
) -> None:
    pbs.reserve(['x0001', 'x0002', 'x0003', 'x0004'], time.time() + 15, time.time() + 600)
    mine = blocks(shrink=0.1)
    job = mine.open(1, 40.0)
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)
    assert pbs.job(job)['walltime_s'] < 16
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED  # it ended itself, and was not killed
    assert pbs.job(job)['how'] == ''


def test_every_node_runs_the_command_in_private_files(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(gpus_per_node=2, ncpus=8)
    job = mine.open(2, command='echo "$FREETRAIN_NODE says $GREETING"')
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.COMPLETED
    assert sorted(mine.output().splitlines()) == ["x0001 says it's 2", "x0002 says it's 2"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in mine.folder.iterdir())


def test_a_block_at_its_limit_is_not_a_failure(pbs: Rehearsal, blocks: Make) -> None:
    mine = blocks(ending_s=0.0)
    job = mine.running(walltime_s=60.0)
    pbs.move_clock(100)
    pbs.wait(lambda: mine.status(job).terminal)
    assert mine.status(job).state is JobState.TIMEOUT
    assert 'time limit' in str(mine.status(job).message)


@pytest.mark.parametrize(
    'fault',
    [
        {
            'status': 35,
            'says': 'qstat: 1.pbs Job has finished, use -x or -H to obtain historical job '
            'information',
        },
        {
            'status': 255,
            'says': 'Connection timed out\nqstat: cannot connect to server pbs (errno=15010)',
        },
        {'status': 0, 'says': ''},  # and no document either
        {'hang': True},
    ],
)
def test_a_scheduler_that_does_not_answer_ends_nothing(
    pbs: Rehearsal, blocks: Make, fault: dict[str, object]
) -> None:
    mine = blocks(command_s=5.0, unreachable_s=1.0, longest_backoff_s=0.5)
    job = mine.running()
    end = mine.provider.end_of(job)
    with pbs.fault('all', **fault):  # type: ignore[arg-type]
        states = set()
        begun = time.monotonic()
        while JobState.UNKNOWN not in states:
            states.add(mine.status(job).state)
            assert time.monotonic() - begun < 60
            time.sleep(0.05)
        assert states <= {JobState.RUNNING, JobState.UNKNOWN}
        assert mine.provider.end_of(job) == end
        pbs.wait(lambda: mine.site.holes() == ())
        if fault.get('status') not in (
            0,
            35,
        ):  # to qdel, 35 says that there is nothing left to delete
            assert mine.provider.cancel([job]) == [False]
    pbs.wait(lambda: mine.status(job).state is JobState.RUNNING)


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'queue': 'batch', 'pin_nodes': True}, 'number of nodes'),
        ({'queue': 'batch', 'priority': 5000}, 'priority'),
        ({'queue': 'batch', 'filesystems': ('a:b',)}, 'filesystems'),
        ({'queue': 'batch', 'pbs_options': ('l x=y',)}, 'must be an option'),
    ],
)
def test_what_the_machine_does_not_give_is_refused_before_anything_is_submitted(
    pbs: Rehearsal, settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        PbsSite(**{**QUICK, **settings}).start()
    assert pbs.jobs() == {}


def test_without_pbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PATH', '/nowhere')
    with pytest.raises(BadInput, match='There is no PBS here'):
        PbsSite(queue='batch').start()
