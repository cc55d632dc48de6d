"""What another user of the same computer tried against a running fragment and its files."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from parsl import curvezmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.fragment.control_channel import (
    HANDSHAKE_MS,
    ControlClient,
    ControlServer,
)
from parsl_freetrain.host.ownership import refuse_replaceable
from parsl_freetrain.ledger.store import Ledger
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Hello, Outcome, Rendezvous
from tests.support.other_user import OTHER, as_other_user, needs_root
from tests.support.ranks import finish, order, ranks, running_fork_server
from tests.support.waiting import under_load, wait_until

pytestmark = needs_root


@pytest.fixture(scope='module')
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkClient]:
    with running_fork_server(tmp_path_factory.mktemp('fork_server')) as parent:
        yield parent


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder of the other user, which everybody may read."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def give_away(folder: Path) -> None:
    """Make the folder and all that is in it the other user's, readable by everybody."""
    for path in (folder, *folder.rglob('*')):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(path, OTHER, OTHER)


def overwrite_for_ever(port: int, path: str, begun: int) -> None:
    """Write the path of a forged checkpoint into every key of the store that may name one."""
    store = TCPStore(
        '127.0.0.1', port, 2, False, timeout=timedelta(minutes=5), wait_for_workers=False
    )
    first_done = 0
    while True:
        for key in {'told/checkpoint', *store.list_keys()}:
            if key.endswith('told/checkpoint'):
                store.set(key, path)
        if not first_done:
            first_done = os.write(begun, b'.')
        time.sleep(0.001)


def test_a_forged_checkpoint_is_not_loaded(
    fork_server: ForkClient, tmp_path: Path, theirs: Path
) -> None:
    """The other user knows the port before rank 1 does, and writes all the time."""
    with ranks(
        fork_server, order(theirs, total_samples=4), 1, tmp_path / 'logs', finish
    ) as forging:
        assert forging.run()[0].how == 'finished'
    forged = PosixCheckpointStore(theirs / 'store', 'digits').latest()
    assert forged is not None
    give_away(theirs)

    with ranks(fork_server, order(tmp_path, total_samples=8), 2, tmp_path / 'logs', finish) as gang:
        victim, tell = gang.ranks[1], gang.ranks[1].process.send
        attackers = ExitStack()

        def attack_first(message: Rendezvous) -> bool:
            ready, done = os.pipe()
            attackers.enter_context(
                as_other_user(lambda: overwrite_for_ever(message.port, forged.path, done))
            )
            os.read(ready, 1)
            return tell(message)

        victim.process.send = attack_first  # type: ignore[method-assign, assignment]
        with attackers:
            gang.hear(lambda: any(rank.status is not None for rank in gang.ranks))
    outcomes = [outcome for rank in gang.ranks for outcome in rank.said(Outcome)]
    logs = ''.join(rank.log.read_text() for rank in gang.ranks)
    assert forged.path not in logs
    assert {outcome.how for outcome in outcomes} <= {'finished', 'peer-lost'}, logs


def test_a_folder_of_another_user_is_not_read(
    fork_server: ForkClient, tmp_path: Path, theirs: Path
) -> None:
    """The trainer's folder was replaced by one of another user between two fragments."""
    with ranks(
        fork_server, order(theirs, total_samples=4), 1, tmp_path / 'logs', finish
    ) as forging:
        assert forging.run()[0].how == 'finished'
    give_away(theirs)
    with ranks(fork_server, order(theirs, total_samples=8), 1, tmp_path / 'logs', finish) as gang:
        (outcome,) = gang.run()
    assert outcome.how == 'error' and 'belongs to another user' in outcome.error.message


def test_a_ledger_that_another_user_can_change_is_refused(tmp_path: Path, theirs: Path) -> None:
    mine = tmp_path / 'mine.sqlite'
    Ledger(mine).close()
    before = mine.read_bytes()
    (tmp_path / 'link').symlink_to(mine)
    with pytest.raises(BadInput, match='not a regular file'):
        Ledger(tmp_path / 'link')
    Ledger(tmp_path / 'given.sqlite').close()
    os.chown(tmp_path / 'given.sqlite', OTHER, OTHER)
    with pytest.raises(BadInput, match='belongs to another user'):
        Ledger(tmp_path / 'given.sqlite')
    theirs.chmod(0o777)
    with pytest.raises(BadInput, match='Other users may write'):
        Ledger(theirs / 'new.sqlite')
    give_away(theirs)
    with pytest.raises(BadInput, match='belongs to another user'):
        Ledger(theirs / 'new.sqlite')
    assert mine.read_bytes() == before and not list(theirs.iterdir())


def test_a_checkpoint_dir_that_another_user_can_replace_is_refused(theirs: Path) -> None:
    folder = theirs / 'shared' / 'checkpoints'
    folder.mkdir(parents=True)
    refuse_replaceable(folder, 'checkpoint_dir')
    folder.parent.chmod(0o777)
    with pytest.raises(BadInput, match='put another folder in place'):
        refuse_replaceable(folder, 'checkpoint_dir')
    folder.parent.chmod(0o1777)
    refuse_replaceable(folder, 'checkpoint_dir')
    link = folder.parent / 'link'
    with as_other_user(lambda: link.symlink_to(folder)) as other:
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    with pytest.raises(BadInput, match='is a link of another user'):
        refuse_replaceable(link / 'mine', 'checkpoint_dir')


def test_half_open_connections_end_soon_and_messages_still_come(tmp_path: Path) -> None:
    """Each takes a file descriptor of the submitting process."""
    certificates = str(curvezmq.create_certificates(str(tmp_path)))
    server = ControlServer(certificates, '127.0.0.1', (50000, 60000))
    before = open_files()

    def flood() -> None:
        held = [socket.create_connection(('127.0.0.1', server.port)) for _ in range(600)]
        time.sleep(600 + len(held))

    try:
        with as_other_user(flood):
            wait_until(lambda: open_files() >= before + 100, 'they do not take the files')
            begun = time.monotonic()
            wait_until(lambda: open_files() < before + 50, 'they are kept')
            assert time.monotonic() - begun < under_load(HANDSHAKE_MS / 1000 + 1)
            client = ControlClient(['127.0.0.1'], server.port, certificates, ('cnn', 3, 1))
            try:
                client.send(Hello('n1'))
                wait_until(lambda: any(server.receive(0.1)), 'the message does not come')
            finally:
                client.close()
    finally:
        server.close()


def open_files() -> int:
    return len(os.listdir('/proc/self/fd'))
