"""Faults inside ranks: wrap a function together with its faults, and train the wrapped function.

A step is a global batch, counted from 0 over the whole training. Step ``n`` is the first one that
begins with at least ``n x batch_size`` trained samples. A fault occurs at most once per fragment,
and only in the fragment with the given number, so that it does not occur again in the next one.
``fragment=None``: in all fragments.
"""

import contextlib
import functools
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.training.checkpoint import fault_hooks

_DATA = ('part-written', 'written')  # the stages after which a rank's data are on disk


class InjectedFault(RuntimeError):
    """Raised by :func:`fail_at`."""


@dataclass(frozen=True)
class Fault:
    """A fault in some ranks of some fragments; made by the functions of this module."""

    rank: int | None  #: rank, fragment: where it occurs; None: in all
    fragment: int | None
    strike: Callable[[], None]  #: causes the fault; called in the rank
    step: int | None = None  #: the step at which it occurs; None: not at a step
    every: bool = False  #: whether it occurs at every step from ``step`` on, not only once
    #: stage, checkpoint: of saving, and which checkpoint of the fragment, from 1.
    stage: str | None = None
    checkpoint: int = 1
    mend: Callable[[], None] | None = None  #: undoes the fault when the save or the function ends


def fail_at(rank: int, step: int, *, fragment: int | None = 1) -> Fault:
    """The user's code raises :class:`InjectedFault` on a rank."""

    def strike() -> None:
        raise InjectedFault(f'rank {rank} fails at step {step}, as a test wants it')

    return Fault(rank, fragment, strike, step)


def kill_at(rank: int, step: int, *, after_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """A rank gets SIGKILL ``after_s`` seconds after a step begins, whatever it is doing then."""
    return Fault(rank, fragment, signalling(signal.SIGKILL, after_s), step)


def preempt_at(seconds: float, *, grace_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """All ranks get SIGTERM (if ``grace_s``) ``seconds`` after their first step, then SIGKILL."""

    def strike() -> None:
        if grace_s > 0:
            signalling(signal.SIGTERM, seconds)()
        signalling(signal.SIGKILL, seconds + grace_s)()

    return Fault(None, fragment, strike, 0)


def disk_full_at(
    byte: int, *, rank: int = 0, checkpoint: int = 1, fragment: int | None = 1
) -> Fault:
    """No file of a rank for the n-th checkpoint grows beyond ``byte`` bytes (EFBIG, OSError)."""

    def strike() -> None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, most))

    def mend() -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    return Fault(rank, fragment, strike, stage='begin', checkpoint=checkpoint, mend=mend)


def with_faults(function: Callable[..., Any], *faults: Fault) -> Callable[..., Any]:
    """The function with faults. Decorate the result with ``freetrain_app``.

    It keeps its name, so that the trainer can continue from the same checkpoints without the
    faults.
    """

    @functools.wraps(function)
    def faulty(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        here = [fault for fault in faults if fault.fragment in (None, ctx.fragment)]
        mine = [fault for fault in here if fault.rank in (None, ctx.rank)]
        at_steps = [fault for fault in mine if fault.stage is None]
        with _at_steps(ctx, at_steps), _at_stages([f for f in mine if f.stage is not None]):
            return function(ctx, *args, **kwargs)

    return faulty


@contextlib.contextmanager
def _at_steps(ctx: Any, faults: list[Fault]) -> Iterator[None]:
    run = ctx._run  # a DataLoader of ctx.prepare begins its loop without ctx.loop
    begin_loop = run.begin_loop

    def watched(data: Any, batch_size: int | None, *settings: Any) -> Iterator[Any]:
        batches = begin_loop(data, batch_size, *settings)
        return _steps(batches, ctx, batch_size or data.batch_size, list(faults))

    if faults:
        run.begin_loop = watched
    try:
        yield
    finally:
        if faults:
            del run.begin_loop


def _steps(
    batches: Iterator[Any], ctx: Any, batch_size: int, waiting: list[Fault]
) -> Iterator[Any]:
    seen = None
    for batch in batches:
        if ctx.samples != seen:  # in reproducible mode a global batch may be of several iterations
            seen = ctx.samples
            steps = seen // batch_size
            for fault in [f for f in waiting if f.step is not None and steps >= f.step]:
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
            elif fault.checkpoint == begun and stage in _DATA and fault.mend is not None:
                fault.mend()

    if faults:
        fault_hooks.on_saving.append(reached)
    try:
        yield
    except BaseException:
        # Mend after an error, to be written; after a normal end a checkpoint may be in progress.
        for fault in faults:
            if fault.mend is not None:
                fault.mend()
        raise


def signalling(number: signal.Signals, after_s: float) -> Callable[[], None]:
    """The strike of a fault that sends a signal to its own rank."""

    def strike() -> None:
        if after_s <= 0:
            os.kill(os.getpid(), number)
            return
        timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    return strike
