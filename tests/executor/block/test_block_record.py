"""When a block has got its nodes, as far as the batch system's answers tell."""

from __future__ import annotations

from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.events import BlockStarted
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block.block_record import BlockRecord


def test_a_block_starts_once_and_not_before_it_was_last_seen_waiting() -> None:
    block = BlockRecord('7', BlockRequest(1), waited_at=1.0)
    assert block.look('b', JobStatus(JobState.PENDING), 5.0) == []
    assert block.look('b', None, 6.0) == block.look('b', JobStatus(JobState.UNKNOWN), 7.0) == []
    assert block.look('b', JobStatus(JobState.RUNNING), 9.0) == [BlockStarted(9.0, 'b', 5.0)]
    assert block.look('b', JobStatus(JobState.RUNNING), 10.0) == block.start('b', 11.0) == []


def test_a_block_that_is_withdrawn_never_starts() -> None:
    block = BlockRecord('7', BlockRequest(1), waited_at=1.0)
    assert block.look('b', JobStatus(JobState.CANCELLED), 5.0) == []
    assert block.look('b', JobStatus(JobState.FAILED), 5.0) == [BlockStarted(5.0, 'b', 1.0)]
