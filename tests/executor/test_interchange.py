"""The pinning interchange against the installed Parsl, on whose private parts it leans."""

import ast
import inspect
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from parsl import curvezmq
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.errors import ManagerLost
from parsl.executors.high_throughput.interchange import Interchange
from parsl.executors.high_throughput.manager_record import ManagerRecord
from parsl.serialize import pack_apply_message

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.executor import interchange
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.settings import INTERCHANGE
from parsl_freetrain.sites.local import LocalSite
from tests.executor.where import where
from tests.support.programs import Program
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, under_load, wait_until

# Everything of Parsl's own that PinningInterchange touches. Should a new Parsl lack one of these,
# this is where it shows.
METHODS = {'process_tasks_to_send': ['self', 'interesting_managers', 'monitoring_radio']}
ATTRIBUTES = {'pending_task_queue', '_ready_managers', 'results_outgoing', 'manager_sock'}
MANAGER_KEYS = {'tasks', 'max_capacity', 'idle_since', 'active', 'draining'}


def test_files_of_a_user_are_not_taken_for_modules_of_python(tmp_path: Path) -> None:
    """They are in the folder in which the program was started."""
    (tmp_path / 'queue.py').write_text('raise ImportError("a user has another one here")')
    done = subprocess.run(
        INTERCHANGE, cwd=tmp_path, input=b'', capture_output=True, timeout=LIMIT_S
    )
    assert done.returncode and b'another one' not in done.stderr


@pytest.mark.parametrize('parents', [(7, 7), (7, 1)])
def test_none_starts_whose_program_was_killed_meanwhile(parents: tuple[int, int]) -> None:
    """It ignores signals of others, and would have stayed for ever."""
    program = f"""
import io, os, pickle, sys
from types import SimpleNamespace
from parsl_freetrain.executor import interchange, interchange_process
parents = iter({parents})
os.getppid = lambda: next(parents)
sys.stdin = SimpleNamespace(buffer=io.BytesIO(pickle.dumps({{}})))
interchange.PinningInterchange = lambda: SimpleNamespace(start=lambda: print('started'))
interchange_process.main()
"""
    done = subprocess.run(
        [sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout) == (0, 'started\n' if parents[1] == 7 else '')


def test_parsl_has_what_the_subclass_needs() -> None:
    for name, parameters in METHODS.items():
        assert list(inspect.signature(getattr(Interchange, name)).parameters) == parameters, (
            f"Parsl's Interchange.{name} has changed"
        )
    source = inspect.getsource(Interchange.__init__)
    made = set(re.findall(r'^\s*self\.(\w+)[^=\n(]*=', source, re.MULTILINE))
    assert made >= ATTRIBUTES, f"Parsl's Interchange has no {ATTRIBUTES - made} any more"
    assert ManagerRecord.__annotations__.keys() >= MANAGER_KEYS, (
        'what Parsl notes of a manager has changed'
    )
    queued = inspect.getsource(Interchange.process_task_incoming)
    assert "msg['task_id']" in queued and "msg['context']" in queued
    assert 'queue_entry = (-priority, -task_id, msg)' in queued
    assert 'Interchange(**config)' in inspect.getsource(sys.modules[Interchange.__module__]), (
        'Parsl starts its interchange in another way'
    )


def test_nothing_else_of_parsls_is_used() -> None:
    """What METHODS, ATTRIBUTES and MANAGER_KEYS name is what the subclass uses."""
    tree = ast.parse(inspect.getsource(interchange))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = (
        {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == 'self'
        }
        - own
        - {'_owner', '_pinned'}
    )
    assert used == ATTRIBUTES
    keys = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and isinstance(node.value, ast.Name)
        and node.value.id in ('m', 'manager')
    }
    assert keys == MANAGER_KEYS


def test_the_subclass_is_thin() -> None:
    text = inspect.getsource(interchange)
    documentation = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith('#') and number not in documentation
    ]
    assert len(code) < 75


def test_a_manager_may_connect_again_before_the_end_of_its_first_connection(tmp_path: Path) -> None:
    """As managers do that start fast: the first connection only asked whether it is possible."""
    with freetrain(tmp_path, LocalSite(nodes=1)) as executor:
        address = f'tcp://127.0.0.1:{executor.worker_port}'
        context = curvezmq.ClientContext(executor.cert_dir)
        connections = [context.socket(zmq.DEALER) for _ in range(2)]
        try:
            for connection in connections:
                connection.setsockopt(zmq.IDENTITY, b'a manager')
                connection.setsockopt(zmq.LINGER, 0)
                connection.connect(address)
                connection.send(pickle.dumps({'type': 'connection_probe'}))
                assert connection.poll(int(under_load(10.0) * 1000)), 'no answer'
        finally:
            context.destroy()


def send(executor: FreeTrainExecutor, manager: str | None = None, **arguments: str) -> Future[str]:
    buffer = pack_apply_message(where, (), arguments)
    sent: Future[str] = executor.submit_payload(
        {'resource_spec': {PIN: manager} if manager else {}}, buffer
    )
    return sent


@contextmanager
def two_busy_nodes(
    folder: Path,
) -> Iterator[tuple[FreeTrainExecutor, dict[str, Path], list[Future[str]]]]:
    """Two nodes of one plain worker each, held up until the file beside its manager exists."""
    folder.mkdir(exist_ok=True)
    releases = [folder / f'release{i}' for i in range(2)]
    with freetrain(folder, LocalSite(nodes=2, poll_s=0.2), max_workers_per_node=1) as executor:
        held = [
            send(executor, started=str(folder / f'started{i}'), wait_for=str(releases[i]))
            for i in range(2)
        ]
        try:
            started = [folder / f'started{i}' for i in range(2)]
            wait_until(lambda: all(f.exists() and f.read_text().endswith('\n') for f in started))
            on = [file.read_text().strip() for file in started]
            assert set(on) == {manager['manager'] for manager in executor.connected_managers()}
            yield executor, dict(zip(on, releases, strict=True)), held
        finally:
            for release in releases:
                release.touch()


def test_pins_hold_and_a_worker_is_kept_for_them(tmp_path: Path) -> None:
    with two_busy_nodes(tmp_path) as (executor, releases, held):
        first, second = releases
        # Every ordinary worker is busy, and more ordinary work is waiting: pinned work runs
        # nevertheless, and where it should.
        waiting = [send(executor) for _ in range(4)]
        for _ in range(3):
            for manager in releases:
                assert send(executor, manager).result(LIMIT_S) == manager
        assert not any(future.done() for future in (*held, *waiting))

        # A pinned task that lasts keeps its worker, and one more waits for it instead of going
        # elsewhere.
        pinned = send(
            executor, first, started=str(tmp_path / 'pinned'), wait_for=str(tmp_path / 'pinned-end')
        )
        wait_until((tmp_path / 'pinned').exists)
        behind = send(executor, first)
        assert send(executor, second).result(LIMIT_S) == second
        assert not behind.done()

        begun = time.monotonic()
        with pytest.raises(ManagerLost):
            send(executor, 'nobody').result(LIMIT_S)
        # It did not take a missed heartbeat to find out.
        assert time.monotonic() - begun < executor.heartbeat_threshold / 2

        # Also where the other node has nothing else to do.
        releases[second].touch()
        assert {
            future.result(LIMIT_S) for future in (*waiting, send(executor), send(executor))
        } == {second}
        assert not behind.done()
        (tmp_path / 'pinned-end').touch()
        assert pinned.result(LIMIT_S) == behind.result(LIMIT_S) == first
        releases[first].touch()
        assert {future.result(LIMIT_S) for future in held} == {first, second}


def test_an_interchange_that_ends_as_it_starts_is_named_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(executor: FreeTrainExecutor) -> None:
        executor.interchange_proc = subprocess.Popen(ENDS)
        executor.interchange_proc.wait()
        raise Exception('Interchange failed to start')  # as Parsl, after two minutes

    monkeypatch.setattr(HighThroughputExecutor, '_start_local_interchange_process', start)
    failed = pytest.raises(FreeTrainError, match=r'status 3; its log is .*interchange\.log')
    with failed, freetrain(tmp_path, LocalSite(nodes=1)):
        pass


ENDS = (sys.executable, '-c', 'import sys; sys.exit(3)')
ORPHAN = """
import sys, threading
from pathlib import Path
from tests.support.training import freetrain
from parsl_freetrain.sites.local import LocalSite

if __name__ == '__main__':
    with freetrain(Path(sys.argv[1]), LocalSite(nodes=1)) as executor:
        print(executor.interchange_proc.pid, flush=True)
        threading.Event().wait()
"""


@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_interchange_ends_with_the_submitting_process(tmp_path: Path) -> None:
    script = tmp_path / 'submit.py'
    script.write_text(ORPHAN)
    with Program([sys.executable, script, tmp_path]) as submitting:
        process = psutil.Process(int(submitting.said()))
        assert 'parsl_freetrain.executor.interchange' in ' '.join(process.cmdline())
        submitting.send_signal(signal.SIGKILL)
        submitting.wait()
        assert not psutil.wait_procs([process], timeout=LIMIT_S)[1]
