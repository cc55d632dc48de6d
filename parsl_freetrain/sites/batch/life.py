"""The life of a block, from what the scheduler says about its job: pure."""

from dataclasses import dataclass
from enum import Enum

from parsl.jobs.states import TERMINAL_STATES, JobStatus
from parsl.jobs.states import JobState as ParslState

from parsl_freetrain.sites.batch.records import JobState


class BlockLife(Enum):
    """Where a block stands. TIMEOUT: nodes were taken; FAILED: asking again would not help."""

    def __init__(self, words: str, parsl: ParslState) -> None:
        self.words, self.parsl = words, parsl

    PENDING = 'waits for its nodes', ParslState.PENDING
    RUNNING = 'runs', ParslState.RUNNING
    SUSPENDED = 'was suspended, so its nodes are taken; it is deleted', ParslState.HELD
    ENDING = 'is ending; its nodes are not free yet', ParslState.RUNNING
    COMPLETED = 'ended by itself', ParslState.COMPLETED
    FAILED = 'ended by itself with an error', ParslState.FAILED
    TIME_LIMIT = 'reached its time limit', ParslState.TIMEOUT
    PREEMPTED = 'was preempted', ParslState.TIMEOUT
    GIVEN_BACK = (
        'was told that its nodes are taken early, and gave them back in time',
        ParslState.TIMEOUT,
    )
    REQUEUED = 'was preempted and waits in the queue again', ParslState.PENDING
    WITHDRAWN = (
        'was withdrawn because it had not started while its hole lasted',
        ParslState.CANCELLED,
    )
    CANCELLED = 'was cancelled by this process', ParslState.CANCELLED
    CANCELLED_BY_OTHERS = 'was cancelled by somebody else', ParslState.CANCELLED
    DEADLINE = (
        'was dropped by the scheduler because it could not end before its hole does',
        ParslState.CANCELLED,
    )
    NODE_FAILED = 'lost a node, which failed', ParslState.TIMEOUT
    BOOT_FAILED = 'could not boot its nodes', ParslState.FAILED
    OUT_OF_MEMORY = 'ran out of memory', ParslState.FAILED
    UNREACHABLE = 'cannot be asked about; it counts as it was', ParslState.UNKNOWN
    FORGOTTEN = (
        'is over: its time is up and the scheduler does not know it any more',
        ParslState.TIMEOUT,
    )


# What a job's state means for its block; the other states have the same name there.
_MEANING = {
    JobState.HELD: BlockLife.PENDING,
    JobState.STARTING: BlockLife.PENDING,
    JobState.TERMINATED: BlockLife.GIVEN_BACK,
    JobState.TIMED_OUT: BlockLife.TIME_LIMIT,
    JobState.CANCELLED: BlockLife.CANCELLED_BY_OTHERS,
    JobState.UNKNOWN: BlockLife.UNREACHABLE,
}


@dataclass(frozen=True)
class Seen:
    """What was last seen of a block, and what this process did to it."""

    state: JobState = JobState.PENDING
    end_s: float | None = None  #: when it ends, in seconds of ``time.time()``; None while unknown
    ran: bool = False  #: whether it was ever seen running
    #: its end was moved forward while it ran, by a preemption or by somebody
    shortened: bool = False
    cancelled: bool = False  #: by this process
    withdrawn: bool = False  #: by this process, because it had not started in time
    taken: bool = False  #: cancelled because its nodes had been taken
    missing: int = 0  #: answers in a row that did not know it


def life_of(seen: Seen) -> BlockLife:
    meaning = _MEANING.get(seen.state) or BlockLife[seen.state.name]
    if meaning is BlockLife.PENDING and seen.ran:
        return BlockLife.REQUEUED
    if seen.shortened and meaning in (BlockLife.COMPLETED, BlockLife.FAILED):
        return BlockLife.GIVEN_BACK
    # Some schedulers do not tell one from the other.
    if meaning in (BlockLife.CANCELLED_BY_OTHERS, BlockLife.PREEMPTED):
        if seen.withdrawn:
            return BlockLife.WITHDRAWN
        if seen.taken:
            return BlockLife.PREEMPTED
        if seen.cancelled:
            return BlockLife.CANCELLED
    return meaning


def is_over(life: BlockLife) -> bool:
    return life.parsl in TERMINAL_STATES


def status_of(
    job_id: str,
    life: BlockLife,
    detail: str = '',
    stdout: str | None = None,
    stderr: str | None = None,
) -> JobStatus:
    """For Parsl, with a sentence that keeps apart what Parsl's states fold together."""
    said = f'job {job_id} {life.words}{detail}'
    return JobStatus(life.parsl, said, stdout_path=stdout, stderr_path=stderr)


def ran_out_of_memory(status: JobStatus) -> bool:
    return BlockLife.OUT_OF_MEMORY.words in (status.message or '')


def forgotten(seen: Seen, latest_end_s: float, now: float, answers: int = 3) -> bool:
    """A block unknown to several answers is over if it must have ended or was deleted here."""
    if seen.state in (JobState.RUNNING, JobState.ENDING) and seen.end_s is not None:
        latest_end_s = seen.end_s
    ended = now > latest_end_s or seen.cancelled or seen.withdrawn or seen.taken
    return seen.missing >= answers and ended
