"""Ranks of the next fragment on nodes that are free: what becomes of the tasks that start them."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from parsl.app.errors import RemoteExceptionWrapper

from parsl_freetrain.core.model.events import StartFragment
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.fragment_state import RunningFragment
from parsl_freetrain.executor.fragment.members import Members
from parsl_freetrain.executor.fragment.node_fork_server import start_template
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.parsl_sides import NoParsl


@pytest.fixture
def control() -> Iterator[ControlServer]:
    server = ControlServer(None, '127.0.0.1', (50000, 60000))
    yield server
    server.close()


@pytest.mark.usefixtures('nodes_share_a_template')
def test_a_program_that_was_started_with_a_template_imports_no_torch_for_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkClient, 'start_template', None)
    forked = start_template(str(tmp_path))
    assert forked.pid and forked._process is None
    forked.stop()


def raised_there() -> RemoteExceptionWrapper:
    try:
        raise OSError('no room for a log')
    except OSError:
        return RemoteExceptionWrapper(*sys.exc_info())


@pytest.mark.parametrize(
    ('comes', 'said'),
    [
        (raised_there(), 'no room for a log'),
        (RuntimeError('its manager is gone'), 'its manager is gone'),
        ([], ''),
    ],
)
def test_why_no_rank_runs_ahead_on_a_free_node_is_logged(
    control: ControlServer, caplog: pytest.LogCaptureFixture, comes: Any, said: str
) -> None:
    caplog.set_level('INFO')
    sent: list[tuple[str, Future[Any]]] = []

    def submit(context: dict[str, Any], _: bytes) -> Future[Any]:
        sent.append((context['resource_spec'][PIN], Future()))
        return sent[-1][1]

    fragment = RunningFragment(
        StartFragment('cnn', 7, ('n0', 'n1'), None, 0),
        0.0,
        Checkpoint('cnn', '', 0, 0),
        outer=Future(),
        started_at=1.0,
    )
    members = Members(control, NoParsl(submit))
    assert members.run_ahead(fragment, ('n0', 'n9'), lambda *_: None)  # type: ignore[arg-type]
    ((node, future),) = sent
    assert node == 'n9'
    if isinstance(comes, BaseException):
        future.set_exception(comes)
    else:
        future.set_result(comes)
    logged = f'No ranks run ahead of the next fragment on a free node: {said}'
    assert [one for one in caplog.messages if one.startswith('No ranks')] == [logged] * bool(said)
