"""The process of :class:`~parsl_freetrain.solver.isolated.IsolatedAllocator`: questions come through a pipe, answers go back.

Whatever happens to its parent, it does not stay: at the end of the pipe it ends, and a question that takes too long is its last
one, for the kernel ends it then, even where a solver that hangs lets no Python run any more.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

from parsl_freetrain.core.allocation import Allocator

# The parent, which knows more about it, comes first.
_AFTER_THE_PARENT_S = 2.0
_LOOK_S = 5.0


def serve(pipe: Connection, parent: int) -> None:
    """Answer until the pipe ends or the parent is another one."""
    inner: Allocator
    inner, patience_s = pipe.recv()
    pipe.send('ready')
    while True:
        while not pipe.poll(_LOOK_S):       # a process forked from the parent may hold the pipe open
            if os.getppid() != parent:
                return
        problem = pipe.recv()
        signal.setitimer(signal.ITIMER_REAL, patience_s + _AFTER_THE_PARENT_S)
        try:
            answer: object = inner.allocate(problem)
        except Exception:
            answer = traceback.format_exc()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        pipe.send(answer)


def main() -> None:
    """Serve at the pipe whose number is the first argument; the second one is the parent."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with Connection(int(sys.argv[1])) as pipe:
        try:
            serve(pipe, int(sys.argv[2]))
        except (EOFError, OSError):
            pass    # the parent is gone


if __name__ == '__main__':
    main()
