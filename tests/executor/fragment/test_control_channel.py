"""The control channel, over real sockets and with Parsl's certificates."""

import contextlib
import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parsl import curvezmq

from parsl_freetrain.executor.fragment import control_channel as cc
from parsl_freetrain.training.spec.messages import FromMember, Hello, Notice, StopTraining
from tests.support.waiting import wait_until

KEY = ('cnn', 3, 1)


@pytest.fixture(params=[True, False], ids=['encrypted', 'plain'])
def cert_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return str(curvezmq.create_certificates(str(tmp_path))) if request.param else None


@pytest.fixture
def server(cert_dir: str | None) -> Iterator[cc.ControlServer]:
    server = cc.ControlServer(cert_dir, '127.0.0.1', (50000, 60000))
    yield server
    server.close()


def open_files() -> int:
    return len(os.listdir('/proc/self/fd'))


@pytest.fixture
def few_files() -> Iterator[int]:
    """This process may open only some hundred files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = open_files() + 250
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_that_say_nothing_do_not_take_all_file_descriptors(few_files: int) -> None:
    server = cc.ControlServer(None, '127.0.0.1', (50000, 60000))
    crowd = f"""
import resource, socket, sys, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
for _ in range(600):
    held.append(socket.socket())
    held[-1].setblocking(False)
    held[-1].connect_ex(('127.0.0.1', {server.port}))
    time.sleep(0.004)
print('open', flush=True)
sys.stdin.read()
"""
    members = []
    try:
        members.append(cc.ControlClient(['127.0.0.1'], server.port, None, KEY))
        members[0].send(Hello('early'))
        assert next_item(lambda: from_server(server))
        with subprocess.Popen(
            [sys.executable, '-c', crowd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            most = 0
            while not select.select([process.stdout], [], [], 0)[0]:
                most = max(most, open_files())
                members[0].send(Hello('still here'))
                assert next_item(lambda: from_server(server))
            process.kill()
        assert most < few_files - 20
        members.append(cc.ControlClient(['127.0.0.1'] * 60, server.port, None, ('cnn', 3, 2)))
        members[1].send(Hello('late'))
        assert wait_until(lambda: [s for s in from_server(server) if s.message == Hello('late')])
    finally:
        for member in members:
            member.close()
        server.close()


def next_item(receive: Callable[[], Any]) -> Any:
    for _ in range(100):
        if item := receive():
            return item
    raise AssertionError('nothing came')


def from_server(server: cc.ControlServer) -> list[Any]:
    return list(server.receive(0.1))


def test_an_end_is_told_after_what_was_said(server: cc.ControlServer, cert_dir: str | None) -> None:
    client = cc.ControlClient(['127.0.0.1'], server.port, cert_dir, KEY)
    client.send(Hello('n1'))
    assert next_item(lambda: from_server(server)) == [FromMember('cnn', 3, 1, Hello('n1'))]
    client.send(Hello('n1'))
    client.close()
    said: list[Any] = []

    def told() -> bool:
        said.extend(from_server(server))
        return len(said) == 2

    wait_until(told)
    assert said == [FromMember('cnn', 3, 1, Hello('n1')), cc.MemberDisconnected('cnn', 3, 1)]


def test_a_notice_comes_before_the_result(server: cc.ControlServer, cert_dir: str | None) -> None:
    """With the result its fragment is over, and its node would be used again."""
    client = cc.ControlClient(['127.0.0.1'], server.port, cert_dir, KEY)
    try:
        client.send(Hello('n1'))
        assert next_item(lambda: from_server(server)) == [FromMember('cnn', 3, 1, Hello('n1'))]
        client.send(Notice('SIGTERM'))
        assert server._router.poll(10_000)
        server.post('the result')
        # The end of a first connection, whose greeting took too long, may be told behind them.
        told = from_server(server)[:2]
        assert told == [FromMember('cnn', 3, 1, Notice('SIGTERM')), 'the result']
    finally:
        client.close()


def test_messages_go_both_ways_once_a_member_spoke(
    server: cc.ControlServer, cert_dir: str | None
) -> None:
    assert not server.send(KEY, StopTraining('test'))
    client = cc.ControlClient(['192.0.2.1', '127.0.0.1'][1:], server.port, cert_dir, KEY)
    try:
        client.send(Hello('n1'))
        assert next_item(lambda: from_server(server)) == [FromMember('cnn', 3, 1, Hello('n1'))]
        assert server.send(KEY, StopTraining('shutdown'))
        client.socket.poll(10_000)
        assert client.receive() == StopTraining('shutdown')
        assert client.receive() is None
        server.forget('cnn', 3)
        assert not server.send(KEY, StopTraining('test'))
    finally:
        client.close()


def test_a_post_from_another_thread_wakes_the_receiver(server: cc.ControlServer) -> None:
    poster = threading.Timer(0.05, server.post, ['hello'])
    poster.start()
    assert next(iter(server.receive(30))) == 'hello'
    poster.join()


def test_a_client_without_certificates_is_not_heard(tmp_path: Path) -> None:
    server = cc.ControlServer(
        str(curvezmq.create_certificates(str(tmp_path))), '127.0.0.1', (50000, 60000)
    )
    stranger = cc.ControlClient(['127.0.0.1'], server.port, None, KEY)
    try:
        stranger.socket.setsockopt(17, 0)  # LINGER: what was never delivered must not delay the end
        with contextlib.suppress(ConnectionError):  # where it has been turned away already
            stranger.send(Hello('n1'))
        assert not any(from_server(server) for _ in range(5))
    finally:
        stranger.close()
        server.close()


def test_an_unreachable_executor_is_a_sentence_with_the_addresses() -> None:
    with pytest.raises(ConnectionError, match=r'127\.0\.0\.1.*address='):
        cc.reachable(['127.0.0.1'], 1, timeout_s=1)
