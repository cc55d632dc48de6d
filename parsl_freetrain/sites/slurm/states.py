"""Slurm's words for the states of jobs (man squeue, JOB STATE CODES)."""

from __future__ import annotations

import signal

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


_OF_SHELL = 128  # a shell's status for a command that a signal ended is this and the signal


def end_of(state: JobState, status: int, signal_number: int) -> JobState:
    """The state, given how the job's first process has ended. The notice of a preemption is a
    SIGTERM, at which a block that is still starting just ends; for Slurm it has failed.
    """
    told = signal_number == signal.SIGTERM or status == _OF_SHELL + signal.SIGTERM
    return JobState.TERMINATED if state is JobState.FAILED and told else state


def state_of(words: str) -> JobState:
    """The state in Slurm's words, such as ``CANCELLED by 0`` or, cut off, ``OUT_OF_ME+``."""
    word = words.split()[0] if words.strip() else ''
    if word.endswith('+'):
        return next(
            (state for name, state in _STATES.items() if name.startswith(word[:-1])),
            JobState.UNKNOWN,
        )
    return _STATES.get(word, JobState.UNKNOWN)
