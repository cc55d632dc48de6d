"""The life of a block, from what the scheduler says about its job: pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parsl.jobs.states import TERMINAL_STATES, JobStatus
from parsl.jobs.states import JobState as ParslState

from parsl_freetrain.sites.batch.records import JobState


class BlockLife(StrEnum):
    """Where a block stands; each member's text says it in words."""

    PENDING = 'waits for its nodes'
    RUNNING = 'runs'
    SUSPENDED = 'was suspended, so its nodes are taken; it is deleted'
    ENDING = 'is ending; its nodes are not free yet'
    COMPLETED = 'ended by itself'
    FAILED = 'ended by itself with an error'
    TIME_LIMIT = 'reached its time limit'
    PREEMPTED = 'was preempted'
    GIVEN_BACK = 'was told that its nodes are taken early, and gave them back in time'
    REQUEUED = 'was preempted and waits in the queue again'
    WITHDRAWN = 'was withdrawn because it had not started while its hole lasted'
    CANCELLED = 'was cancelled by this process'
    CANCELLED_BY_OTHERS = 'was cancelled by somebody else'
    DEADLINE = 'was dropped by the scheduler because it could not end before its hole does'
    NODE_FAILED = 'lost a node, which failed'
    BOOT_FAILED = 'could not boot its nodes'
    OUT_OF_MEMORY = 'ran out of memory'
    UNREACHABLE = 'cannot be asked about; it counts as it was'
    FORGOTTEN = 'is over: its time is up and the scheduler does not know it any more'


# What a job's state means for its block.
_MEANING = {
    JobState.PENDING: BlockLife.PENDING,
    JobState.HELD: BlockLife.PENDING,
    JobState.STARTING: BlockLife.PENDING,
    JobState.RUNNING: BlockLife.RUNNING,
    JobState.SUSPENDED: BlockLife.SUSPENDED,
    JobState.ENDING: BlockLife.ENDING,
    JobState.COMPLETED: BlockLife.COMPLETED,
    JobState.FAILED: BlockLife.FAILED,
    JobState.TERMINATED: BlockLife.GIVEN_BACK,
    JobState.TIMED_OUT: BlockLife.TIME_LIMIT,
    JobState.PREEMPTED: BlockLife.PREEMPTED,
    JobState.CANCELLED: BlockLife.CANCELLED_BY_OTHERS,
    JobState.DEADLINE: BlockLife.DEADLINE,
    JobState.NODE_FAILED: BlockLife.NODE_FAILED,
    JobState.BOOT_FAILED: BlockLife.BOOT_FAILED,
    JobState.OUT_OF_MEMORY: BlockLife.OUT_OF_MEMORY,
    JobState.UNKNOWN: BlockLife.UNREACHABLE,
}

# TIMEOUT: nodes were taken, which is normal life. FAILED: asking for the same again at once would
# not help.
_PARSL = {
    BlockLife.PENDING: ParslState.PENDING,
    BlockLife.REQUEUED: ParslState.PENDING,
    BlockLife.RUNNING: ParslState.RUNNING,
    BlockLife.SUSPENDED: ParslState.HELD,
    BlockLife.ENDING: ParslState.RUNNING,
    BlockLife.COMPLETED: ParslState.COMPLETED,
    BlockLife.FAILED: ParslState.FAILED,
    BlockLife.TIME_LIMIT: ParslState.TIMEOUT,
    BlockLife.PREEMPTED: ParslState.TIMEOUT,
    BlockLife.GIVEN_BACK: ParslState.TIMEOUT,
    BlockLife.WITHDRAWN: ParslState.CANCELLED,
    BlockLife.CANCELLED: ParslState.CANCELLED,
    BlockLife.CANCELLED_BY_OTHERS: ParslState.CANCELLED,
    BlockLife.DEADLINE: ParslState.CANCELLED,
    BlockLife.NODE_FAILED: ParslState.TIMEOUT,
    BlockLife.BOOT_FAILED: ParslState.FAILED,
    BlockLife.OUT_OF_MEMORY: ParslState.FAILED,
    BlockLife.UNREACHABLE: ParslState.UNKNOWN,
    BlockLife.FORGOTTEN: ParslState.TIMEOUT,
}


@dataclass(frozen=True)
class Seen:
    """What was last seen of a block, and what this process did to it.

    Attributes
    ----------
    end_s
        When it ends, in seconds of ``time.time()``; None while unknown.
    ran
        Whether it was ever seen running.
    shortened
        Whether its end was moved forward while it ran, by a preemption or by somebody.
    cancelled, withdrawn
        Whether this process cancelled it, and whether because it had not started in time.
    taken
        Whether this process cancelled it because its nodes had been taken.
    missing
        Answers in a row that did not know it.
    """

    state: JobState = JobState.PENDING
    end_s: float | None = None
    ran: bool = False
    shortened: bool = False
    cancelled: bool = False
    withdrawn: bool = False
    taken: bool = False
    missing: int = 0


def life_of(seen: Seen) -> BlockLife:
    """Where a block stands."""
    meaning = _MEANING[seen.state]
    if meaning is BlockLife.PENDING and seen.ran:
        return BlockLife.REQUEUED
    if seen.shortened and meaning in (BlockLife.COMPLETED, BlockLife.FAILED):
        return BlockLife.GIVEN_BACK
    ended = meaning in (
        BlockLife.CANCELLED_BY_OTHERS,
        BlockLife.PREEMPTED,
    )  # some schedulers do not tell one from the other
    if ended and seen.withdrawn:
        return BlockLife.WITHDRAWN
    if ended and seen.taken:
        return BlockLife.PREEMPTED
    if ended and seen.cancelled:
        return BlockLife.CANCELLED
    return meaning


def is_over(life: BlockLife) -> bool:
    """Whether the block's nodes are free, for good."""
    return _PARSL[life] in TERMINAL_STATES


def status_of(
    job_id: str,
    life: BlockLife,
    detail: str = '',
    stdout: str | None = None,
    stderr: str | None = None,
) -> JobStatus:
    """For Parsl, with a sentence that keeps apart what Parsl's states fold together."""
    return JobStatus(
        _PARSL[life], f'job {job_id} {life.value}{detail}', stdout_path=stdout, stderr_path=stderr
    )


def ran_out_of_memory(status: JobStatus) -> bool:
    """Whether the scheduler says that a job ended since it needed too much memory."""
    return BlockLife.OUT_OF_MEMORY.value in (status.message or '')


def forgotten(seen: Seen, latest_end_s: float, now: float, answers: int = 3) -> bool:
    """Whether a block that the scheduler does not know any more is over.

    It must have ended by now, or been deleted by this process, and several answers must agree.
    """
    ended = now > latest_end_s or seen.cancelled or seen.withdrawn or seen.taken
    return seen.missing >= answers and ended
