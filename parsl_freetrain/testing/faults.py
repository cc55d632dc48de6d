"""Faults within ranks: a function is wrapped together with what shall go wrong, and the wrapped one is trained.

A step is a global batch, counted from 0 over the whole training: step ``n`` is the first one to begin with at least ``n x batch_size``
samples trained. A fault strikes once per fragment at most, and only in the fragment of the number that it is given, so that
the next fragment is not struck again; ``fragment=None``: in all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training import seams


class Injected(RuntimeError):
    """What :func:`fail_at` raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in some ranks of some fragments; made by the functions of this module.

    Attributes
    ----------
    rank, fragment
        In which; None: in all.
    step
        At which step; None: not at a step.
    strike
        What is done: called in the rank, by its main thread.
    every
        At every step from that one on, and not only once.
    stage
        At which stage of saving, after how many checkpoints of the fragment.
    mend
        Undoes it, when the saving or the function is over.
    """

    rank: int | None
    fragment: int | None
    strike: Callable[[], None]
    step: int | None = None
    every: bool = False
    stage: str | None = None
    checkpoint: int = 1
    mend: Callable[[], None] | None = None


def fail_at(rank: int, step: int, *, fragment: int | None = 1) -> Fault:
    """The user's code raises :class:`Injected` in a rank."""
    def strike() -> None:
        raise Injected(f'rank {rank} fails at step {step}, as a test wants it')
    return Fault(rank, fragment, strike, step)


def kill_at(rank: int, step: int, *, after_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """A rank gets SIGKILL ``after_s`` seconds after the beginning of a step, wherever it is by then."""
    return Fault(rank, fragment, _signalling(signal.SIGKILL, after_s), step)


def stop_at(rank: int, step: int, *, after_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """A rank gets SIGSTOP ``after_s`` seconds after the beginning of a step: it lives, holds its connections, and does nothing."""
    return Fault(rank, fragment, _signalling(signal.SIGSTOP, after_s), step)


def slow_rank(rank: int, seconds_per_step: float, *, step: int = 0, fragment: int | None = None) -> Fault:
    """A rank takes so many seconds more for every step, from ``step`` on."""
    return Fault(rank, fragment, lambda: time.sleep(seconds_per_step), step, every=True)


def disconnect_at(rank: int, step: int, *, fragment: int | None = 1) -> Fault:
    """All TCP connections of a rank are shut down in both directions, while it goes on."""
    return Fault(rank, fragment, _shut_down_connections, step)


def preempt_at(seconds: float, *, grace_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """So many seconds after their first step all ranks get SIGTERM, if there is a grace, and SIGKILL when it is over."""
    def strike() -> None:
        if grace_s > 0:
            _signalling(signal.SIGTERM, seconds)()
        _signalling(signal.SIGKILL, seconds + grace_s)()
    return Fault(None, fragment, strike, 0)


def kill_between(after: str = 'written', before: str = 'committed', *, checkpoint: int = 1, fragment: int | None = 1) -> Fault:
    """The rank that saves gets SIGKILL between two stages of its n-th checkpoint, as soon as the first of them is reached.

    Parameters
    ----------
    after, before
        Of 'begin' (there is a directory), 'written' (the data), 'manifest' (their digests), 'before-commit', 'committed' (the marker).

    Raises
    ------
    BadInput
        If they are not stages in this order.
    """
    stages = seams.SAVING_STAGES
    if after not in stages or before not in stages or stages.index(after) >= stages.index(before):
        raise BadInput(f'kill_between({after!r}, {before!r}): name two of the stages {", ".join(stages)}, in this order.')
    return Fault(0, fragment, _signalling(signal.SIGKILL, 0.0), stage=after, checkpoint=checkpoint)


def disk_full_at(byte: int, *, checkpoint: int = 1, fragment: int | None = 1) -> Fault:
    """No file of the n-th checkpoint can grow beyond so many bytes.

    The kernel refuses the write by a limit to file sizes, so the error is EFBIG ('File too large'), an OSError as
    ENOSPC is; it needs no rights and no disk. :func:`~parsl_freetrain.testing.disk.full_disk` makes a real ENOSPC.
    """
    def strike() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def mend() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return Fault(0, fragment, strike, stage='begin', checkpoint=checkpoint, mend=mend)


def with_faults(function: Callable[..., Any], *faults: Fault) -> Callable[..., Any]:
    """The function with faults; decorate what it returns by ``freetrain_app``, or hand it to the ranks in another way.

    It keeps its name, so that the trainer goes on from the same checkpoints without the faults.
    """
    @functools.wraps(function)
    def faulty(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        mine = [fault for fault in faults if fault.fragment in (None, ctx.fragment) and fault.rank in (None, ctx.rank)]
        with _at_steps(ctx, [fault for fault in mine if fault.stage is None]), _at_stages([f for f in mine if f.stage is not None]):
            return function(ctx, *args, **kwargs)
    return faulty


@contextlib.contextmanager
def _at_steps(ctx: Any, faults: list[Fault]) -> Iterator[None]:
    loop = ctx.loop

    def watched(dataset: Any, batch_size: int, **options: Any) -> Iterator[Any]:
        return _steps(loop(dataset, batch_size, **options), ctx, batch_size, list(faults))
    if faults:
        ctx.loop = watched
    try:
        yield
    finally:
        if faults:
            del ctx.loop


def _steps(batches: Iterator[Any], ctx: Any, batch_size: int, waiting: list[Fault]) -> Iterator[Any]:
    seen = None
    for batch in batches:
        if ctx.samples != seen:   # in reproducible mode a global batch may have several turns
            seen = ctx.samples
            for fault in [f for f in waiting if f.step is not None and seen // batch_size >= f.step]:
                if not fault.every:
                    waiting.remove(fault)
                fault.strike()
        yield batch


@contextlib.contextmanager
def _at_stages(faults: list[Fault]) -> Iterator[None]:
    begun = 0

    def reached(stage: str) -> None:
        nonlocal begun
        begun += stage == 'begin'
        for fault in faults:
            if fault.checkpoint == begun and fault.stage == stage:
                fault.strike()
            elif fault.checkpoint == begun and stage == 'written' and fault.mend is not None:
                fault.mend()
    if faults:
        seams.on_saving.append(reached)
    try:
        yield
    except BaseException:
        # What cannot be written must still be told, in the log for instance. The function's end is not the last checkpoint's.
        for fault in faults:
            if fault.mend is not None:
                fault.mend()
        raise


def _signalling(number: signal.Signals, after_s: float) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)

    def strike() -> None:
        if after_s <= 0:
            send()
            return
        timer = threading.Timer(after_s, send)
        timer.daemon = True
        timer.start()
    return strike


def _shut_down_connections() -> None:
    for entry in list(Path('/proc/self/fd').iterdir()):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.shutdown(socket.SHUT_RDWR)
