"""What holds for every test: it leaves nothing behind, and finds a home of its own.

Anything left behind fails the test that left it: a process, a thread, a listening port, a file in the home folder or in the
repository. Things get some seconds to go away first. Processes that have lost their parents are known by an environment variable that
every process inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tests.support.cobalt import cobalt  # noqa: F401 fixtures for every test
from tests.support.pbs import pbs  # noqa: F401
from tests.support.slurm import slurm, slurm_cluster  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
MARKER = 'FREETRAIN_TEST_ID'
SESSION = uuid.uuid4().hex
PATIENCE_S = 15.0
# What tools write into the repository when they run as tests, all of it ignored by git.
EXPECTED = {'demo-out'}
# Helpers that Python starts once and keeps to its end.
HELPERS = ('multiprocessing.resource_tracker', 'multiprocessing.forkserver')

T = TypeVar('T')


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores Ctrl-C, as one half of `make test` is: it has to end its cluster.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A session within a session (a test that runs pytest) keeps the outer one's mark.
    os.environ[MARKER] = os.environ.get(MARKER, '') + ':' + SESSION
    # Parsl renames its processes, for which setproctitle would overwrite their environment and with it the mark.
    os.environ['SPT_NOENV'] = '1'
    # Parsl starts its own programs by name, also where the virtual environment is not activated.
    os.environ['PATH'] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get('PATH', '')])
    # The list of fonts takes seconds to make; the home folder of the last session is gone.
    os.environ['MPLCONFIGDIR'] = str(config.cache.mkdir('matplotlib')) if config.cache is not None else ''


@pytest.fixture(scope='session', autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home folder for the whole session."""
    folder = tmp_path_factory.mktemp('home')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('HOME', str(folder))
        yield folder


@pytest.fixture(scope='session', autouse=True)
def no_orphans() -> Iterator[None]:
    """At the end of the session no process is left that any test started, whatever became of its parent."""
    yield
    _expect_nothing('processes of this test session', lambda: _ours() - _known_helpers(), _describe, _kill)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, as current folder: for what writes runinfo/ or checkpoints/ where it runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def leaves_nothing_behind(home: Path) -> Iterator[None]:
    """Whatever the test starts is over when it ends."""
    processes, threads, ports, files = _ours(), set(threading.enumerate()), _listening(), _files(home)
    parsl_before = _parsl()
    yield
    parsl_left = _parsl()
    if parsl_left is not None and parsl_left is not parsl_before:
        _end_parsl(parsl_left)
        pytest.fail('left behind a loaded Parsl: use "with parsl.load(...)"', pytrace=False)
    _expect_nothing('processes', lambda: _ours() - processes - _known_helpers(), _describe, _kill)
    _expect_nothing('threads', lambda: {t for t in threading.enumerate() if not t.daemon} - threads, str)
    _expect_nothing('listening ports', lambda: _listening() - ports, str)
    _expect_nothing('files outside its own folder', lambda: _files(home) - files, str)


def _expect_nothing(what: str, left: Callable[[], set[T]], describe: Callable[[T], str],
                    remove: Callable[[T], None] = lambda _: None) -> None:
    """Wait for ``left()`` to become empty; else remove what is left, for the sake of the next test, and fail."""
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


def _ours() -> set[psutil.Process]:
    """Processes that descend from this one or carry its mark, zombies apart."""
    me = psutil.Process()
    found = set(me.children(recursive=True))
    mark = f':{SESSION}'.encode()
    for folder in Path('/proc').iterdir():
        if folder.name.isdecimal() and int(folder.name) != me.pid:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if mark in (folder / 'environ').read_bytes():
                    found.add(psutil.Process(int(folder.name)))
    return {process for process in found if _alive(process)}


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _known_helpers() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if any(helper in _describe(child) for helper in HELPERS)}


def _describe(process: psutil.Process) -> str:
    try:
        return f'{process.pid} {" ".join(process.cmdline())[:200]}'
    except psutil.Error:
        return f'{process.pid}'


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(signal.SIGKILL)


def _listening() -> set[tuple[str, int]]:
    """Ports on which this very process listens; those of others go with them."""
    return {(str(c.laddr.ip), int(c.laddr.port)) for c in psutil.Process().net_connections('inet') if c.status == psutil.CONN_LISTEN}


def _files(home: Path) -> set[Path]:
    """What should not appear: anything in the home folder, and things beside the sources, such as Parsl's runinfo."""
    return set(home.iterdir()) | {
        path for path in ROOT.iterdir() if not path.name.startswith('.') and path.name not in EXPECTED and path.suffix != '.egg-info'}


def _parsl() -> Any:
    """The Parsl that is loaded now, None if there is none."""
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
