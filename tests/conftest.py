"""Every test has a home folder of its own, and fails if a process, thread, port or file is left."""

import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Set
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psutil
import pytest

from tests.support import openpbs as pbs_server
from tests.support import scheduling, template, workers
from tests.support import slurm as slurm_cluster
from tests.support.batch_tests import cobalt, lsf, pbs  # noqa: F401 fixtures for every test
from tests.support.openpbs import openpbs  # noqa: F401
from tests.support.ranks import fork_server, neighbour  # noqa: F401
from tests.support.slurm import has_slurm, slurm  # noqa: F401
from tests.support.template import nodes_share_a_template  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
MARKER = 'FREETRAIN_TEST_ID'
PATIENCE_S = 120.0  # for things to go away; a passing test needs a fraction of a second
# Several tests run at once: more threads than processors would wait for each other, spinning. Set
# before any module imports torch.
os.environ.setdefault('OMP_NUM_THREADS', '1')
# Who waits must not spin where there are more threads than processors. Here rather than in a
# test, as the next one: a template that was started with another value is of no use to later tests.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')
os.environ.setdefault('PYTORCH_NVML_BASED_CUDA_CHECK', '1')  # as Lightning does when imported
# On a computer with accelerators too: ranks of one test would have to share them, and what they
# compute is compared with plain loops on the CPU. `make gpu` is for accelerators.
os.environ.update(CUDA_VISIBLE_DEVICES='', ZE_AFFINITY_MASK='')  # ROCm has the first, too
# Nor does time decide the verdict of a property: by default hypothesis fails an example that takes
# 200 ms, and a strategy that is slow on a busy machine.
hypothesis.settings.register_profile(
    'time decides nothing',
    deadline=None,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile('time decides nothing')
# What tools write into the repository when they run as tests, all of it ignored by git.
EXPECTED = {'demo-out'}
# Helpers that Python starts once and keeps to its end.
HELPERS = ('multiprocessing.resource_tracker', 'multiprocessing.forkserver')

T = TypeVar('T')


class _Session:
    """What marks the processes of this one: of its tests, or of a worker's."""

    mark = ''


def _mark() -> None:
    """Mark what this process starts. A session within a session keeps the outer one's mark."""
    _Session.mark = f':{uuid.uuid4().hex}'
    os.environ[MARKER] = os.environ.get(MARKER, '') + _Session.mark


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--workers', type=int, default=0, help='run test files in so many processes')


def pytest_configure(config: pytest.Config) -> None:
    _mark()
    # Parsl renames its processes, for which setproctitle would overwrite their environment and with
    # it the mark.
    os.environ['SPT_NOENV'] = '1'
    # Parsl starts its own programs by name, also where the virtual environment is not activated.
    os.environ['PATH'] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get('PATH', '')]
    )
    # A shell starts what runs in the background with Ctrl-C ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # torch sets it when something compiles: processes from before and after then could not be
    # forked from one template.
    os.environ.setdefault(
        'TORCHINDUCTOR_CACHE_DIR', str(Path(tempfile.gettempdir()) / 'torchinductor_tests')
    )
    # The list of fonts takes seconds to make; the home folder of the last session is gone.
    os.environ['MPLCONFIGDIR'] = str(Path(tempfile.gettempdir()) / 'matplotlib_tests')


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    # The modules that are imported here stay to the end: looking for garbage among their objects
    # takes a quarter of the time, and later some of every test's.
    gc.disable()
    config = session.config
    if config.getoption('workers') > 1 and not config.option.collectonly:
        ending = contextlib.ExitStack()
        ending.enter_context(template.of_all_workers())
        config.add_cleanup(ending.close)
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption('workers')
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    workers.run(session, scheduling.units(session.items, ROOT), count, _mark)
    try:  # what lost the mark of a worker has that of this process
        _expect_nothing(
            'processes of a worker', lambda: _without_helpers(_ours()), _describe, _kill
        )
    except pytest.fail.Exception as error:
        raise session.Failed(str(error)) from error
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """A cluster takes processor time, and other sessions wait for the PBS server."""
    if slurm_cluster.SHARED.cluster or pbs_server.SHARED.cluster:
        _end_clusters(nextitem.path if isinstance(nextitem, pytest.Item) else None)


def _end_clusters(file: Path | None = None) -> None:
    """Those that the tests of this file do not need."""
    text = '' if file is None else file.read_text()
    for shared, mark in ((slurm_cluster.SHARED, 'slurm'), (pbs_server.SHARED, 'pbs')):
        if not re.search(rf'mark\.{mark}\b', text):
            shared.end()


@pytest.fixture(scope='session', autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home folder for the whole session."""
    folder = tmp_path_factory.mktemp('home')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('HOME', str(folder))
        yield folder


@pytest.fixture(scope='session', autouse=True)
def no_orphans() -> Iterator[None]:
    """At the end of the session, no process that a test started is left, with or without parent."""
    yield
    _end_clusters()
    _expect_nothing('processes of tests', lambda: _without_helpers(_ours()), _describe, _kill)


@pytest.fixture(scope='session', autouse=True)
def shared_template(no_orphans: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All executors of a session share one import of torch."""
    with template.shared(tmp_path_factory.getbasetemp() / 'template.log'):
        yield


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the test's own folder the current one, for what writes runinfo/ where it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_determinism_for_later_processes() -> Iterator[None]:
    """With it, executors of later tests could not fork from the session's template."""
    yield
    os.environ.pop('TORCHINDUCTOR_DETERMINISTIC', None)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(home: Path) -> Iterator[None]:
    """Fail if something that the test started goes on after it."""
    processes, threads = _pids(), set(threading.enumerate())
    sockets, files = set(_sockets().values()), _files(home)
    parsl_before = _parsl()
    yield
    parsl_left = _parsl()
    if parsl_left is not None and parsl_left is not parsl_before:
        _end_parsl(parsl_left)
        pytest.fail('left behind a loaded Parsl: use "with parsl.load(...)"', pytrace=False)
    _expect_nothing('processes', lambda: _without_helpers(_ours(processes)), _describe, _kill)
    _expect_nothing(
        'threads', lambda: {t for t in threading.enumerate() if not t.daemon} - threads, str
    )
    _expect_nothing('listening ports', lambda: _listening(sockets), str)
    _expect_nothing('files outside its own folder', lambda: _files(home) - files, str)


def _expect_nothing(
    what: str,
    left: Callable[[], set[T]],
    describe: Callable[[T], str],
    remove: Callable[[T], None] = lambda _: None,
) -> None:
    """Wait until ``left()`` is empty; else remove what is left, and fail."""
    end = time.monotonic() + PATIENCE_S
    pause = 0.001
    while found := left():
        if time.monotonic() > end:
            described = sorted(describe(thing) for thing in found)
            for thing in found:
                remove(thing)
            pytest.fail(f'left behind {what}: ' + '; '.join(described), pytrace=False)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _pids() -> set[int]:
    """Return the ids of all processes of this computer."""
    return {int(name) for name in os.listdir('/proc') if name.isdecimal()}


def _ours(before: Set[int] = frozenset()) -> set[psutil.Process]:
    """Processes that descend from this one or carry its mark, but zombies and those ``before``."""
    mark = _Session.mark.encode()
    found = set()
    for pid in _pids() - before - {os.getpid()}:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            alive = _state_and_parent(pid)[0] != b'Z'
            if alive and (_descends(pid) or mark in _proc(pid, 'environ')):
                found.add(psutil.Process(pid))
    return found


def _descends(pid: int) -> bool:
    roots = {os.getpid(), *template.pids()}
    while pid > 1:
        pid = int(_state_and_parent(pid)[1])
        if pid in roots:
            return True
    return False


def _state_and_parent(pid: int) -> tuple[bytes, int]:
    # The name of the program stands before them in brackets, and may contain any character.
    fields = _proc(pid, 'stat').rpartition(b')')[2].split(maxsplit=2)
    return fields[0], int(fields[1])


def _proc(pid: int | str, name: str) -> bytes:
    with open(f'/proc/{pid}/{name}', 'rb', buffering=0) as file:
        return file.read()


def _without_helpers(processes: set[psutil.Process]) -> set[psutil.Process]:
    return {
        process
        for process in processes
        if process.pid not in {template.pid_of_all(), *template.pids()}
        and not any(helper in _describe(process) for helper in HELPERS)
    }


def _describe(process: psutil.Process) -> str:
    try:
        return f'{process.pid} {" ".join(process.cmdline())[:200]}'
    except psutil.Error:
        return f'{process.pid}'


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)


def _sockets() -> dict[int, str]:
    """Return this process's open sockets by file descriptor."""
    found = {}
    for descriptor in os.listdir('/proc/self/fd'):
        with contextlib.suppress(OSError):
            found[int(descriptor)] = os.readlink(f'/proc/self/fd/{descriptor}')
    return {number: name for number, name in found.items() if name.startswith('socket:')}


def _listening(before: Set[str]) -> set[tuple[str, int]]:
    """The ports on which this process listens with sockets that were not there ``before``."""
    sockets = {number: name for number, name in _sockets().items() if name not in before}
    if not sockets:
        return set()  # the kernel's lists of ports are those of the whole computer, and long
    return {
        (str(c.laddr.ip), int(c.laddr.port))
        for c in psutil.Process().net_connections('inet')
        if c.status == psutil.CONN_LISTEN and c.fd in sockets
    }


def _files(home: Path) -> set[Path]:
    """What should not appear: anything in the home folder, and things beside the sources."""
    return set(home.iterdir()) | {
        path
        for path in ROOT.iterdir()
        if not path.name.startswith('.')
        and path.name not in EXPECTED
        and path.suffix != '.egg-info'
    }


def _parsl() -> Any:
    """Return the Parsl that is loaded now, None if there is none."""
    parsl = sys.modules.get('parsl')
    if parsl is None:
        return None
    try:
        return parsl.dfk()
    except parsl.errors.NoDataFlowKernelError:
        return None


def _end_parsl(kernel: Any) -> None:
    """Unload Parsl, so that the next test can load its own."""
    if not kernel.cleanup_called:
        kernel.cleanup()
    sys.modules['parsl'].clear()
