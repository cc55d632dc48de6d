"""Whether a run goes on, has ended, or has died without a word; and how to resume it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from parsl_freetrain.ledger.rows import Run, Story

SILENT_S = 90.0
"""A live run notes something every 30 seconds; one that has not for so long is said to be silent."""

SAME_START_S = 2.0
"""A process that started so much later or earlier than the run's is another one, which got its number."""


@dataclass(frozen=True)
class Life:
    """What has become of a run.

    Attributes
    ----------
    state
        'running', 'ended', 'silent' (it may have died, or cannot write) or 'died'.
    sentence
        What to know about a run that is silent or has died; else empty.
    """

    state: str
    sentence: str = ''


def gone_here(about: Mapping[str, Any]) -> bool:
    """Whether the run's process was on this computer and is there no more."""
    if about.get('host') != platform.node() or 'pid' not in about:
        return False
    try:
        process = psutil.Process(int(about['pid']))
        return bool(abs(process.create_time() - float(about['started'])) > SAME_START_S or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def life_of(story: Story, run: Run, about: Mapping[str, Any], now: float,
            gone: Callable[[Mapping[str, Any]], bool] = gone_here) -> Life:
    """What has become of a run.

    Parameters
    ----------
    about
        Who runs it, where; see :meth:`parsl_freetrain.ledger.reader.Reader.about`.
    now
        Epoch seconds.
    gone
        Whether the process that this is about is known to be gone.
    """
    if run.ended_at is not None:
        return Life('ended')
    process = f'its process {about["pid"]} on {about["host"]}' if {'pid', 'host'} <= about.keys() else 'its process'
    if not story.alive(run):
        return Life('died', f'This run died: {process} ended without a word, and another run has begun since.')
    if gone(about):
        return Life('died', f'This run died: {process} is gone, and did not end it. {how_to_resume(run, about)}')
    silent_s = now - run.last_at
    if silent_s > SILENT_S:
        return Life('silent', f'This run has noted nothing for {silent_s:.0f} s: {process} may have died, or cannot write its ledger. '
                              f'If it is gone: {how_to_resume(run, about)}')
    return Life('running')


def how_to_resume(run: Run, about: Mapping[str, Any]) -> str:
    """How to go on with a run that is over."""
    where = f'in {about["folder"]} ' if about.get('folder') and about['folder'] != os.getcwd() else ''
    again = f'run {run.command} {where}again' if run.command else 'run the same program again'
    return f'To resume, {again}; it goes on from the checkpoints.'
