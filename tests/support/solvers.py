"""Allocators that fail in ways that need a child process."""

import os
import signal
import threading
import time

import psutil

from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from tests.support.processes import command_line


class Wayward:
    """Fails as the first bid's name says: 'abort', 'hang', 'raise'; otherwise it is correct."""

    def allocate(self, problem: Problem) -> Answer:
        match problem.bids[0].name:
            case 'abort':
                os.abort()
            case 'hang':
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
                while True:
                    time.sleep(60)
            case 'raise':
                raise RuntimeError('no licence')
            case 'pid':
                return Answer('optimal', float(os.getpid()), 'test', 0.0)
            case 'open files':
                return Answer(
                    'optimal',
                    float(threading.active_count()),
                    'test',
                    0.0,
                    {name: 0 for fd in os.listdir('/proc/self/fd') if (name := _target(fd))},
                )
        return DpAllocator().allocate(problem)


def _target(fd: str) -> str:
    try:
        return os.readlink(f'/proc/self/fd/{fd}')
    except OSError:
        return ''


def children() -> list[psutil.Process]:
    """The running solver processes that this process has started."""
    return [
        process
        for process in psutil.Process().children()
        if 'parsl_freetrain.solver.child' in command_line(process)
    ]
