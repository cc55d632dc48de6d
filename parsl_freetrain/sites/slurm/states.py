"""Slurm's words for the states of jobs (man squeue, JOB STATE CODES)."""

from __future__ import annotations

from parsl_freetrain.sites.batch.records import JobState

_STATES = {
    'PENDING': JobState.PENDING,
    'RESV_DEL_HOLD': JobState.HELD,
    'REQUEUE_FED': JobState.HELD,
    'REQUEUED': JobState.HELD,
    'REQUEUE_HOLD': JobState.HELD,
    'SPECIAL_EXIT': JobState.HELD,
    'EXPEDITING': JobState.HELD,
    'CONFIGURING': JobState.STARTING,
    'POWER_UP_NODE': JobState.STARTING,
    'RUNNING': JobState.RUNNING,
    'RESIZING': JobState.RUNNING,
    'SIGNALING': JobState.RUNNING,
    'SUSPENDED': JobState.SUSPENDED,
    'STOPPED': JobState.SUSPENDED,
    'COMPLETING': JobState.ENDING,
    'STAGE_OUT': JobState.ENDING,
    'COMPLETED': JobState.COMPLETED,
    'FAILED': JobState.FAILED,
    'TIMEOUT': JobState.TIMED_OUT,
    'PREEMPTED': JobState.PREEMPTED,
    'CANCELLED': JobState.CANCELLED,
    'REVOKED': JobState.CANCELLED,
    'DEADLINE': JobState.DEADLINE,
    'NODE_FAIL': JobState.NODE_FAILED,
    'LAUNCH_FAILED': JobState.NODE_FAILED,
    'RECONFIG_FAIL': JobState.NODE_FAILED,
    'BOOT_FAIL': JobState.BOOT_FAILED,
    'OUT_OF_MEMORY': JobState.OUT_OF_MEMORY,
}


def state_of(words: str) -> JobState:
    """The state in Slurm's words, such as ``CANCELLED by 0`` or, cut off, ``OUT_OF_ME+``."""
    word = words.split()[0] if words.strip() else ''
    if word.endswith('+'):
        return next(
            (state for name, state in _STATES.items() if name.startswith(word[:-1])),
            JobState.UNKNOWN,
        )
    return _STATES.get(word, JobState.UNKNOWN)
