"""Runs a solver in a child process, so that a crash or hang costs only one decision."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe

from parsl_freetrain.core.allocation.problem import Allocator, Answer, Problem
from parsl_freetrain.core.allocation.solution import Asked

logger = logging.getLogger(__name__)

_START_S = 60.0


class IsolatedAllocator:
    """Runs a (pickled) allocator in a child process. If that dies, or takes ``margin_s`` seconds
    more than its time limit, the answer is to stay put, and the next problem starts a new one.
    """

    def __init__(self, inner: Allocator, time_limit_s: float, margin_s: float = 5.0) -> None:
        self._inner = inner
        self._patience_s = time_limit_s + margin_s
        self._one_at_a_time = threading.Lock()
        self._child: _SolverProcess | None = None
        self._closed = False

    def allocate(self, problem: Problem) -> Answer:
        """The inner allocator's answer, or staying put if there is none."""
        asked = Asked(problem, 'milp')
        with self._one_at_a_time:
            try:
                if self._child is None and not self._closed:
                    self._child = _SolverProcess(self._inner, self._patience_s)
                if self._child is not None and not self._closed:
                    return self._child.ask(problem)
            except (EOFError, OSError, _Failed) as error:
                if not self._closed:
                    logger.warning(
                        'The solver did not answer, what runs is kept: %s',
                        str(error) or 'its process has ended.',
                    )
                self._drop()
        return asked.stay()

    def close(self) -> None:
        """End the child. Its problem and all later ones are answered by staying put."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()  # a waiting thread notices at once
        with self._one_at_a_time:
            self._drop()

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end()


class _Failed(Exception):
    """There is no answer, for the reason given."""


class _SolverProcess:
    def __init__(self, inner: Allocator, patience_s: float) -> None:
        self._patience_s = patience_s
        self._pipe, theirs = Pipe()
        with theirs:
            ids = str(theirs.fileno()), str(os.getpid())
            # It inherits only its end of the pipe, and a session that no Ctrl-C reaches.
            self._process = subprocess.Popen(
                [sys.executable, '-P', '-m', 'parsl_freetrain.solver.child', *ids],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._pipe.send((inner, patience_s))
            self._receive(_START_S)
        except BaseException:
            self.end()
            raise

    def ask(self, problem: Problem) -> Answer:
        self._pipe.send(problem)
        answer = self._receive(self._patience_s)
        if not isinstance(answer, Answer):
            raise _Failed(str(answer))
        return answer

    def _receive(self, patience_s: float) -> object:
        if not self._pipe.poll(patience_s):
            raise _Failed(
                f'its process has been killed after {patience_s:g} seconds without an answer.'
            )
        try:
            received: object = self._pipe.recv()
        except EOFError:
            raise _Failed(f'its process has ended with status {self._process.wait()}.') from None
        return received

    def kill(self) -> None:
        # Kill its whole session, since the solver may be a separate program.
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self._process.wait()
        self._pipe.close()
