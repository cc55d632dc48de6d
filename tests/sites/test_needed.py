"""When a site asks for nodes to be given back to waiting jobs."""

from __future__ import annotations

from typing import Any, cast

import pytest

from parsl_freetrain.core.model.node_demand import BlockNodes, NodeDemand
from parsl_freetrain.sites.batch.demand import Needs
from parsl_freetrain.sites.batch.records import BatchJob, JobState
from parsl_freetrain.sites.batch.watch import QueueSnapshot
from parsl_freetrain.sites.slurm.site import SlurmSite

DEMANDS = tuple(NodeDemand(job, 1, frozenset('ab')) for job in ('alike', 'other'))


class Answers:
    """What the scheduler says: two jobs wait, and have been able to start for ``could_start``."""

    def __init__(self, could_start: float) -> None:
        self._could_start = could_start

    def must_look(self) -> bool:
        return True

    def snapshot(self) -> QueueSnapshot:
        jobs = (
            BatchJob('alike', JobState.PENDING, 'batch', 1, preempts=False),
            BatchJob('other', JobState.PENDING, 'batch', 1),
        )
        return QueueSnapshot(jobs=jobs)

    def needs(self, _: QueueSnapshot) -> Needs:
        return Needs(DEMANDS, frozenset({'alike', 'other'}))

    def could_start_s(self, _: str) -> float:
        return self._could_start

    def reserved(self, _: QueueSnapshot) -> tuple[NodeDemand, ...]:
        return ()

    def nodes_held(self) -> dict[str, tuple[str, ...]]:
        return {'7': ('a', 'b')}


@pytest.mark.parametrize(
    ('mode', 'could_start_s', 'wanted'),
    [
        ('backfill', 0.0, DEMANDS),
        # The scheduler takes nodes for it, unless it takes the wrong ones, or too few.
        ('preemptible', 5.9, DEMANDS[:1]),
        ('preemptible', 6.0, DEMANDS),
    ],
)
def test_jobs_that_preempt_are_served_when_the_scheduler_does_not(
    mode: str, could_start_s: float, wanted: tuple[NodeDemand, ...]
) -> None:
    site = SlurmSite(partition='batch', mode=mode, waiting_poll_s=3.0)
    site._tracker = cast(Any, Answers(could_start_s))
    assert site.needed() == (wanted, (BlockNodes('7', ('a', 'b')),))
