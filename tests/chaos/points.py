"""Faults inside a rank, at a named point: the first there removes its file, and is struck."""

import functools
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from parsl_freetrain.host.processes import tcp_sockets
from parsl_freetrain.testing import InjectedFault
from parsl_freetrain.training.checkpoint import fault_hooks

Point = Literal[
    'function begins', 'prepared', 'step', 'exchange', 'exchanged', 'stepped', 'epoch', 'leaving',
    'begin', 'written', 'manifest', 'before-commit', 'committed',
    'outer-begin', 'outer-written', 'outer-manifest', 'outer-before-commit', 'outer-committed',
]  # fmt: skip
"""Where: the last ten are stages of saving a checkpoint, and the weights after an outer step."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _fail() -> None:
    raise InjectedFault('the function fails, as a test wants it')


def _exit() -> None:
    os._exit(0)


def _disconnect() -> None:
    for sock in tcp_sockets():
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _no_large_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    mend = threading.Timer(1.0, resource.setrlimit, (resource.RLIMIT_FSIZE, (hard, hard)))
    mend.daemon = True
    mend.start()


FAULTS: dict[str, tuple[Point, Callable[[], None]]] = {
    'kill as the function begins': ('function begins', _kill),
    'kill when the state is restored': ('prepared', _kill),
    'kill in a step': ('step', _kill),
    'kill in an exchange': ('exchange', _kill),
    'kill after an exchange': ('exchanged', _kill),
    'kill after a step': ('stepped', _kill),
    'kill at the end of an epoch': ('epoch', _kill),
    'kill in a handover': ('leaving', _kill),
    'kill as a save begins': ('begin', _kill),
    'kill when the data are written': ('written', _kill),
    'kill when the table is written': ('manifest', _kill),
    'kill before the commit': ('before-commit', _kill),
    'kill after the commit': ('committed', _kill),
    'kill as an outer step begins': ('outer-begin', _kill),
    'kill when its weights are written': ('outer-written', _kill),
    'kill when its table is written': ('outer-manifest', _kill),
    'kill before an outer commit': ('outer-before-commit', _kill),
    'kill after an outer commit': ('outer-committed', _kill),
    'stop in an outer step': ('outer-written', _stop),
    'stop in a step': ('step', _stop),
    'stop in an exchange': ('exchange', _stop),
    'stop in a save': ('written', _stop),
    'error': ('step', _fail),
    'end without a word': ('step', _exit),
    'connections shut down': ('step', _disconnect),
    'files cannot grow': ('begin', _no_large_files),
}
"""The point and what happens there, by name."""


def with_ordered_faults(function: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The function, struck by those of :data:`FAULTS` whose files are in ``folder``."""

    def reached(point: str) -> None:
        for name, (where, strike) in FAULTS.items():
            if where == point:
                try:
                    (folder / name).unlink()
                except FileNotFoundError:
                    continue
                strike()

    @functools.wraps(function)
    def struck(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        reached('function begins')
        fault_hooks.on_saving.append(reached)
        prepare, loop = ctx.prepare, ctx.loop

        def prepared(*given: Any, **options: Any) -> Any:
            found = prepare(*given, **options)
            reached('prepared')
            steps = ctx._run.model.steps
            exchange = steps._exchange

            def exchanged(*what: Any) -> Any:
                reached('exchange')
                answer = exchange(*what)
                reached('exchanged')
                return answer

            vars(steps)['_exchange'] = exchanged
            ctx.after_step(lambda: reached('stepped'))
            ctx.each_epoch(lambda: reached('epoch'))
            return found

        def batches(*given: Any, **options: Any) -> Iterator[Any]:
            for batch in loop(*given, **options):
                reached('step')
                yield batch

        ctx.prepare, ctx.loop = prepared, batches
        return function(ctx, *args, **kwargs)

    return struck
