"""IsolatedAllocator's child: problems and answers by a pipe, with which, or a timer, it ends."""

import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from parsl_freetrain.core.allocation.problem import Allocator

# The parent kills first: it can report more about the failure.
_AFTER_THE_PARENT_S = 2.0
_LOOK_S = 5.0


def serve(pipe: Connection, parent: int) -> None:
    """Answer until the pipe closes or the parent process is gone."""
    inner: Allocator
    inner, patience_s = pipe.recv()
    pipe.send('ready')
    while True:
        while not pipe.poll(_LOOK_S):  # a process forked from the parent may hold the pipe open
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
    """Serve the pipe of file descriptor ``argv[1]`` for the parent process ``argv[2]``."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # EOFError, OSError: the parent is gone.
    with suppress(EOFError, OSError), Connection(int(sys.argv[1])) as pipe:
        serve(pipe, int(sys.argv[2]))


if __name__ == '__main__':
    main()
