"""One process per session that has imported torch: fork servers of tests are its forks."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.fork_request import start_environment
from parsl_freetrain.training.process.node_agent import TEMPLATE_VARIABLE
from tests.support.waiting import LIMIT_S

start_by_itself = ForkClient.start_template


# What functions of the tests and workflows import where they run, and torch where tensors have no
# data or are compared: each rank would, in every fragment.
OF_RANKS = (
    'tests.support.training', 'tests.support.patience', 'pytest', 'matplotlib.figure', 'sympy',
    'torch.distributed.tensor',
)  # fmt: skip


class _Session:
    """The templates of this session, the last in use. ``of_all``: what workers fork theirs from."""

    log = Path(os.devnull)
    templates: list[ForkClient] = []
    of_all: ForkClient | None = None


def name() -> str:
    """Return the name of the session's template, which is started at the first call."""
    if not _Session.templates:
        if _Session.of_all is None:
            started = _spawn(*OF_RANKS)
        else:
            started = ForkClient.start(_new(), os.getpid(), str(_Session.log), _Session.of_all.name)
        _begin(started)
    return _Session.templates[-1].name


def _new() -> str:
    return f'session-{secrets.token_hex(8)}'


def _begin(started: ForkClient) -> None:
    _Session.templates.append(started)
    started.wait_ready(LIMIT_S)


def _spawn(*modules: str) -> ForkClient:
    own = _new()
    program = (
        'import sys; import parsl_freetrain.training.process.fork_server as server; '
        f'server._TO_IMPORT += {modules!r}; sys.exit(server.main())'
    )
    with _Session.log.open('ab') as log:
        process = subprocess.Popen(
            [sys.executable, '-P', '-c', program, '--name', own, '--owner-pid', str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=start_environment(),
            start_new_session=True,
        )
    return ForkClient(own, str(_Session.log), process)


@contextmanager
def of_all_workers() -> Iterator[None]:
    """One import of torch for all workers, beside what this process does."""
    started = _Session.of_all = _spawn(*OF_RANKS)
    try:
        yield
    finally:
        _Session.of_all = None
        started.stop()


@contextmanager
def that_imports(*modules: str) -> Iterator[None]:
    """Fork from a template that has imported these beside what each fragment imports."""
    started = _spawn(*modules)
    _begin(started)
    try:
        yield
    finally:
        _Session.templates.remove(started)
        started.stop()


def for_nodes() -> dict[str, str]:
    """Environment in which a scheduler's nodes, all here, fork from the session's template."""
    return {TEMPLATE_VARIABLE: name()}


@pytest.fixture
def nodes_share_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets :func:`for_nodes` for the blocks of a test."""
    for variable, value in for_nodes().items():
        monkeypatch.setenv(variable, value)


def pids() -> set[int]:
    """Return the process ids of templates that have been started; no test owns them."""
    return {template.pid or 0 for template in _Session.templates}


def pid_of_all() -> int:
    """Return the process id of the template of all workers, 0 if there is none."""
    of_all = _Session.of_all
    return 0 if of_all is None or of_all._process is None else of_all._process.pid


def _start_forked(own_name: str, owner_pid: int, log: str) -> ForkClient:
    started = ForkClient.start(own_name, owner_pid, log, name())
    started.wait_ready(LIMIT_S)  # start_template promises that it can be used at once
    return started


@contextmanager
def shared(log: Path) -> Iterator[None]:
    """Fork the templates of this process from a shared one, which writes into ``log``."""
    _Session.log = log
    setattr(ForkClient, 'start_template', staticmethod(_start_forked))  # noqa: B010
    try:
        yield
    finally:
        setattr(ForkClient, 'start_template', start_by_itself)  # noqa: B010
        while _Session.templates:
            _Session.templates.pop().stop()
