"""Parsl's manager of a node; its processes are forked from one that has imported Parsl."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

from parsl_freetrain.executor.parsl_import import import_parsl
from parsl_freetrain.host.leftovers import own_names
from parsl_freetrain.training.process.linux import die_with_parent

POOL = 'parsl.executors.high_throughput.process_worker_pool'
ONLY_MEMBERS = '--max_workers_per_node=1'  # the one worker is that of fragments


def main() -> None:
    with own_names():
        import_parsl(runs_apps=ONLY_MEMBERS not in sys.argv)
        # Apps find modules beside them, as in Parsl's own workers.
        sys.path.insert(0, os.getcwd())
        fork_server()
        import parsl.multiprocessing  # not before: see import_parsl

        context: Any = multiprocessing.get_context('forkserver')
        parsl.multiprocessing.SpawnContext = context
        runpy.run_module(POOL, run_name='__main__', alter_sys=True)


def fork_server() -> None:
    """Start ``multiprocessing``'s fork server as a fork of this process, which has the imports."""
    from parsl.utils import setproctitle

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        try:
            # This side of the pipe by which the server learns of its clients' end must be closed.
            for name in os.listdir('/proc/self/fd'):
                if int(name) > 2 and int(name) not in passfds:
                    with suppress(OSError):  # the one by which the folder was listed
                        os.close(int(name))
            setproctitle("parsl: fork server of a node's workers")
            _end_together()
            exec(args[-1], {})  # noqa: S102  # the statement that the interpreter would be given
        finally:
            os._exit(0)

    resource_tracker.ensure_running()
    spawn, util.spawnv_passfds = util.spawnv_passfds, fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _end_together() -> None:
    """End this process with the manager, and its workers (which keep the block) with it."""
    die_with_parent()
    server = os.getpid()
    os.register_at_fork(
        after_in_child=lambda: die_with_parent() if os.getppid() == server else None
    )


if __name__ == '__main__':
    main()
