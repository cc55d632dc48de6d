"""The fork server: one per name, ranks that start and end, and none that outlives its owner."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import StopTraining
from tests.support.ranks import KILLED, Ranks, order, ranks
from tests.support.waiting import LIMIT_S


def forever(ctx: FragmentContext) -> None:
    import signal

    print('here')
    while True:
        signal.pause()


def at_once(ctx: FragmentContext) -> None:
    raise LookupError('at once')


def wait_until_gone(pids: list[int]) -> None:
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)
        assert ready, f'process {pid} still runs'


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def parents(tmp_path: Path, owner: subprocess.Popen[bytes]) -> Iterator[list[ForkClient]]:
    """Two of one name, started at the same time for one owner."""
    name = secrets.token_hex(8)
    started = [
        ForkClient.start(name, owner.pid, str(tmp_path / 'fork_server.log')) for _ in range(2)
    ]
    try:
        yield started
    finally:
        for parent in started:
            parent.stop()


def test_two_starts_give_one_parent_that_ends_with_its_owner(
    parents: list[ForkClient], owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    for parent in parents:
        parent.wait_ready(LIMIT_S)
    one, other = parents
    assert one.pid is not None
    assert one.pid == other.pid
    # A scheduler's notice goes to all processes; the parent stays for as long as its owner.
    os.kill(one.pid, signal.SIGTERM)
    gangs = [
        Ranks(parent, order(tmp_path), 1, tmp_path / str(i), forever)
        for i, parent in enumerate(parents)
    ]
    pids = [one.pid, *(gang.ranks[0].process.pid for gang in gangs)]
    assert len(set(pids)) == 3
    owner.kill()
    owner.wait()
    wait_until_gone(pids)
    for gang in gangs:
        with pytest.raises(EOFError):
            gang.run()
        gang.close()
    with pytest.raises(FreeTrainError, match='does not listen'):
        one.launch(order(tmp_path), gangs[0].ranks[0].place, b'', {})


def test_an_owner_that_is_gone_already(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, '-c', ''])
    process.wait()
    parent = ForkClient.start(secrets.token_hex(8), process.pid, str(tmp_path / 'fork_server.log'))
    with pytest.raises(FreeTrainError, match='ended'):
        parent.wait_ready(60)


def test_a_parent_that_cannot_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'torch.py').write_text('raise ImportError("no torch today")')
    monkeypatch.syspath_prepend(tmp_path)
    parent = ForkClient.start(secrets.token_hex(8), os.getpid(), str(tmp_path / 'fork_server.log'))
    with pytest.raises(FreeTrainError, match=r'fork_server\.log(.|\n)*no torch today'):
        parent.wait_ready(60)
    parent.stop()
    assert (tmp_path / 'fork_server.log').stat().st_mode & 0o777 == 0o600


def test_the_end_of_the_parent_is_the_end_of_its_ranks(
    parents: list[ForkClient], tmp_path: Path
) -> None:
    parents[0].wait_ready(120)
    assert parents[0].pid is not None
    with ranks(parents[0], order(tmp_path), 1, tmp_path, forever) as gang:
        os.kill(parents[0].pid, signal.SIGKILL)
        wait_until_gone([gang.ranks[0].process.pid])


def test_a_rank_nobody_listens_to_is_ended(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = Ranks(fork_server, order(tmp_path), 1, tmp_path, forever)
    gang.close()
    wait_until_gone([gang.ranks[0].process.pid])


def test_kill_is_reported(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, order(tmp_path), 1, tmp_path, forever) as gang:
        gang.ranks[0].process.kill()
        assert gang.run() == [KILLED]
        assert gang.ranks[0].status == -signal.SIGKILL
        with pytest.raises(EOFError):
            gang.ranks[0].process.recv()
        assert not gang.ranks[0].process.send(StopTraining('too late'))
        gang.ranks[0].process.kill()


def test_many_fragments_at_once(fork_server: ForkClient, tmp_path: Path) -> None:
    gangs = [Ranks(fork_server, order(tmp_path), 1, tmp_path / str(i), at_once) for i in range(6)]
    for gang in gangs:
        (outcome,) = gang.run()
        assert (outcome.how, outcome.error.message, gang.ranks[0].status) == ('error', 'at once', 1)
        gang.close()


def test_a_large_payload_arrives(fork_server: ForkClient, tmp_path: Path) -> None:
    def check(ctx: FragmentContext, data: bytes) -> None:
        raise LookupError(str(len(data)))

    with ranks(fork_server, order(tmp_path), 1, tmp_path, check, bytes(20_000_000)) as gang:
        assert gang.run()[0].error.message == '20000000'
