"""The manager of a node as apps see it."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from parsl import python_app

from parsl_freetrain.app import freetrain_app
from parsl_freetrain.sites.local import LocalSite
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


def test_apps_find_modules_beside_the_workflow_and_their_programs_end_on_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes ignore SIGTERM; what an app starts must not inherit that."""
    (tmp_path / 'beside.py').write_text('ANSWER = 42\n')
    monkeypatch.chdir(tmp_path)

    @python_app
    def ask() -> int:
        import beside  # type: ignore[import-not-found]

        return int(beside.ANSWER)

    @python_app
    def terminated() -> int:
        import subprocess

        with subprocess.Popen(['sleep', '1000']) as sleeping:
            sleeping.terminate()
            return sleeping.wait(LIMIT_S)

    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2), max_workers_per_node=1):
        assert ask().result(LIMIT_S) == 42
        freetrain_app(total_epochs=1)(fit)().result(LIMIT_S)
        assert terminated().result(LIMIT_S) == -signal.SIGTERM


WORKER = """
import multiprocessing, threading, time
from multiprocessing import forkserver
from parsl_freetrain.executor.block.manager import fork_server

def work(pipe):
    threading.Thread(target=time.sleep, args=(1e6,)).start()  # as what it could not send
    pipe.send(None)

if __name__ == '__main__':
    fork_server()
    context = multiprocessing.get_context('forkserver')
    here, there = context.Pipe()
    worker = context.Process(target=work, args=(there,))
    worker.start()
    here.recv()
    print(forkserver._forkserver._forkserver_pid, worker.pid, flush=True)
    time.sleep(1e6)
"""


def test_a_killed_manager_takes_its_fork_server_and_its_workers_with_it(tmp_path: Path) -> None:
    script = tmp_path / 'worker.py'
    script.write_text(WORKER)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as manager:
        assert manager.stdout is not None
        its = [psutil.Process(int(pid)) for pid in manager.stdout.readline().split()]
        assert len(its) == 2
        manager.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(process.is_running() for process in its))
