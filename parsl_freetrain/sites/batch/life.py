"""The life of a block, from what the scheduler says about its job: pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parsl.jobs.states import JobState, JobStatus


class Life(StrEnum):
    """Where a block stands; each member's text says it in words."""

    PENDING = 'waits for its nodes'
    RUNNING = 'runs'
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


# States in Slurm's words and what they mean for a block (man squeue, JOB STATE CODES).
_MEANING = {
    'PENDING': Life.PENDING, 'CONFIGURING': Life.PENDING, 'RESV_DEL_HOLD': Life.PENDING, 'REQUEUE_FED': Life.PENDING,
    'REQUEUED': Life.PENDING, 'REQUEUE_HOLD': Life.PENDING, 'SPECIAL_EXIT': Life.PENDING, 'EXPEDITING': Life.PENDING,
    'RUNNING': Life.RUNNING, 'SUSPENDED': Life.RUNNING, 'STOPPED': Life.RUNNING, 'RESIZING': Life.RUNNING, 'SIGNALING': Life.RUNNING,
    'COMPLETING': Life.ENDING, 'STAGE_OUT': Life.ENDING,
    'COMPLETED': Life.COMPLETED, 'FAILED': Life.FAILED, 'TIMEOUT': Life.TIME_LIMIT, 'PREEMPTED': Life.PREEMPTED,
    'CANCELLED': Life.CANCELLED_BY_OTHERS, 'REVOKED': Life.CANCELLED_BY_OTHERS, 'DEADLINE': Life.DEADLINE,
    'NODE_FAIL': Life.NODE_FAILED, 'LAUNCH_FAILED': Life.NODE_FAILED, 'RECONFIG_FAIL': Life.NODE_FAILED,
    'BOOT_FAIL': Life.BOOT_FAILED, 'OUT_OF_MEMORY': Life.OUT_OF_MEMORY, 'POWER_UP_NODE': Life.PENDING,
}

# TIMEOUT: nodes were taken, which is normal life. FAILED: asking for the same again at once would not help.
_PARSL = {
    Life.PENDING: JobState.PENDING, Life.REQUEUED: JobState.PENDING, Life.RUNNING: JobState.RUNNING, Life.ENDING: JobState.RUNNING,
    Life.COMPLETED: JobState.COMPLETED, Life.FAILED: JobState.FAILED, Life.TIME_LIMIT: JobState.TIMEOUT,
    Life.PREEMPTED: JobState.TIMEOUT, Life.GIVEN_BACK: JobState.TIMEOUT,
    Life.WITHDRAWN: JobState.CANCELLED, Life.CANCELLED: JobState.CANCELLED,
    Life.CANCELLED_BY_OTHERS: JobState.CANCELLED, Life.DEADLINE: JobState.CANCELLED, Life.NODE_FAILED: JobState.TIMEOUT,
    Life.BOOT_FAILED: JobState.FAILED, Life.OUT_OF_MEMORY: JobState.FAILED, Life.UNREACHABLE: JobState.UNKNOWN,
    Life.FORGOTTEN: JobState.TIMEOUT,
}


@dataclass(frozen=True)
class Seen:
    """What was last seen of a block, and what this process did to it.

    Attributes
    ----------
    state
        The scheduler's word, translated into Slurm's; empty while it has not been seen.
    end_s
        When it ends, in seconds of ``time.time()``; None while unknown.
    ran
        Whether it was ever seen running.
    shortened
        Whether its end was moved forward while it ran, by a preemption or by somebody.
    cancelled, withdrawn
        Whether this process cancelled it, and whether because it had not started in time.
    missing
        Answers in a row that did not know it.
    """

    state: str = ''
    end_s: float | None = None
    ran: bool = False
    shortened: bool = False
    cancelled: bool = False
    withdrawn: bool = False
    missing: int = 0


def life_of(seen: Seen) -> Life:
    """Where a block stands. A state that nobody has documented counts as unreachable, never as an end."""
    if not seen.state:
        return Life.PENDING
    meaning = _MEANING.get(seen.state, Life.UNREACHABLE)
    if meaning is Life.PENDING and seen.ran:
        return Life.REQUEUED
    if seen.shortened and meaning in (Life.COMPLETED, Life.FAILED):
        return Life.GIVEN_BACK
    ended = meaning in (Life.CANCELLED_BY_OTHERS, Life.PREEMPTED)     # some schedulers do not tell one from the other
    if ended and seen.withdrawn:
        return Life.WITHDRAWN
    if ended and seen.cancelled:
        return Life.CANCELLED
    return meaning


def is_over(life: Life) -> bool:
    """Whether the block's nodes are free, for good."""
    return _PARSL[life].name in ('COMPLETED', 'FAILED', 'TIMEOUT', 'CANCELLED')


def status_of(job_id: str, life: Life, detail: str = '', stdout: str | None = None, stderr: str | None = None) -> JobStatus:
    """For Parsl, with a sentence that keeps apart what Parsl's states fold together."""
    return JobStatus(_PARSL[life], f'job {job_id} {life.value}{detail}', stdout_path=stdout, stderr_path=stderr)


def forgotten(seen: Seen, latest_end_s: float, now: float, answers: int = 3) -> bool:
    """Whether a block that the scheduler does not know any more is over: it must have ended by now, and several answers agree."""
    return seen.missing >= answers and now > latest_end_s
