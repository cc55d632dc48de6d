"""One process per session that has imported torch: fork servers of tests are forked from it.

An import of torch takes as much processor time as the rest of a small training. Executors fork
their nodes' servers from a template already; here, that template is a fork, too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.node_agent import TEMPLATE_VARIABLE
from tests.support.waiting import LIMIT_S

start_by_itself = ForkClient.start_template


class _Session:
    """The template of this process's session, None until something needs it."""

    log = Path(os.devnull)
    template: ForkClient | None = None


def name() -> str:
    """Return the name of the session's template, which is started at the first call."""
    if _Session.template is None:
        _Session.template = start_by_itself(
            f'session-{secrets.token_hex(8)}', os.getpid(), str(_Session.log)
        )
        _Session.template.wait_ready(LIMIT_S)
    return _Session.template.name


def for_nodes() -> dict[str, str]:
    """Environment in which the nodes of a batch scheduler, all of them this computer, fork from the
    session's template.

    For trainings of many blocks, whose nodes would import torch once each, and where it does not
    matter which of a node's processes its scheduler sees.
    """
    return {TEMPLATE_VARIABLE: name()}


@pytest.fixture
def nodes_share_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets :func:`for_nodes` for the blocks of a test."""
    for variable, value in for_nodes().items():
        monkeypatch.setenv(variable, value)


def pids() -> set[int]:
    """Return the process id of the session's template if it has been started; no test owns it."""
    return set() if _Session.template is None else {_Session.template.pid or 0}


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
        if _Session.template is not None:
            _Session.template.stop()
            _Session.template = None
