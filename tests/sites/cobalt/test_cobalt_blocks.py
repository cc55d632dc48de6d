"""Blocks on a machine with Cobalt: what they fit, and the ways in which they end."""

import time
from collections.abc import Callable

import pytest
from parsl.jobs.states import JobState

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.sites.cobalt import CobaltSite
from tests.sites.batch_blocks import QUICK, Blocks
from tests.support.batch_tests import Rehearsal
from tests.support.waiting import under_load

Make = Callable[..., Blocks]


def test_a_block_fits_the_window_in_which_jobs_are_backfilled(
    cobalt: Rehearsal, blocks: Make
) -> None:
    cobalt.others(1, walltime_s=600)
    wide = cobalt.others(4, walltime_s=600)
    planned = cobalt.job(wide)['planned']['start']
    mine = blocks()
    [hole] = mine.holes()
    assert (hole.nodes, hole.names) == (3, ('nid00021', 'nid00022', 'nid00023'))
    assert hole.until_s is not None
    assert planned - 66 <= hole.until_s <= planned - 2  # to the minute
    job = mine.open(hole.nodes, hole.until_s - time.time())
    cobalt.wait(lambda: mine.status(job).state is JobState.RUNNING)
    assert cobalt.job(job)['walltime_s'] % 60 == 0
    end = mine.provider.end_of(job)
    assert end is not None
    assert end <= hole.until_s
    assert cobalt.job(wide)['planned']['start'] == planned


def test_named_nodes_are_asked_for(cobalt: Rehearsal, blocks: Make) -> None:
    from parsl_freetrain.core.model.types import BlockRequest

    mine = blocks(pin_nodes=True)
    mine.provider.open_block(BlockRequest(2, 300.0, names=('nid00021', 'nid00023')), 'true', 'pin')
    [script] = mine.folder.glob('*.sh')
    assert '#COBALT --attrs location=21,23\n' in script.read_text()


def test_a_block_without_a_trace_is_not_over(cobalt: Rehearsal, blocks: Make) -> None:
    mine = blocks()
    job = mine.running(command='rm -f *.cobaltlog; sleep 600')
    cobalt.finish(job)
    cobalt.wait(lambda: cobalt.job(job)['state'] == 'over')
    for log in mine.folder.glob('*.cobaltlog'):
        log.unlink()
    cobalt.wait(lambda: mine.status(job).state is JobState.UNKNOWN)
    for _ in range(5):
        assert mine.status(job).state is JobState.UNKNOWN
        time.sleep(0.2)


@pytest.mark.parametrize(
    'fault', [{'status': 1, 'says': 'failed to connect to system component'}, {'hang': True}]
)
def test_a_scheduler_that_does_not_answer_ends_nothing(
    cobalt: Rehearsal, blocks: Make, fault: dict[str, object]
) -> None:
    mine = blocks(command_s=5.0, unreachable_s=1.0, longest_backoff_s=0.5)
    job = mine.running()
    with cobalt.fault('all', **fault):  # type: ignore[arg-type]
        states = set()
        begun = time.monotonic()
        while JobState.UNKNOWN not in states:
            states.add(mine.status(job).state)
            assert time.monotonic() - begun < under_load(20.0)
            time.sleep(0.05)
        assert states <= {JobState.RUNNING, JobState.UNKNOWN}
        assert mine.provider.cancel([job]) == [False]
        with pytest.raises(FreeTrainError, match='did not'):
            mine.open(1)
    cobalt.wait(lambda: mine.status(job).state is JobState.RUNNING)


def test_what_the_machine_does_not_give_is_refused_before_anything_is_submitted(
    cobalt: Rehearsal,
) -> None:
    for settings, sentence in (
        ({'queue': 'nosuch'}, r"no queue 'nosuch'; it has batch, closed, debug, preemptable\."),
        ({'queue': 'debug', 'least_nodes': 3}, 'takes 0 to 2 nodes'),
        ({'queue': 'batch', 'requeue': True}, 'does not put jobs back'),
        ({'queue': 'batch', 'mcdram': 'a:b'}, 'mcdram'),
    ):
        with pytest.raises(BadInput, match=sentence):
            CobaltSite(**{**QUICK, **settings}).start()
    assert cobalt.jobs() == {}
