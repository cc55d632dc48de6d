"""What another user of the same computer tried against a running fragment and its files."""

import grp
import os
import pwd
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from parsl import curvezmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.fragment import control_channel as cc
from parsl_freetrain.executor.run_lock import keep_others_out
from parsl_freetrain.host import ownership
from parsl_freetrain.host.ownership import refuse_replaceable
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.sites.packed_environment import PackedEnvironment
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Hello, Outcome, Rendezvous
from tests.support.other_user import OTHER, as_other_user, needs_root
from tests.support.ranks import finish, order, ranks
from tests.support.waiting import under_load, wait_until

pytestmark = needs_root


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
        for key in {'object/checkpoint-0', *store.list_keys()}:
            if 'object/checkpoint' in key:
                store.set(key, path)
        if not first_done:
            first_done = os.write(begun, b'.')
        time.sleep(0.001)


def test_forged_checkpoints_are_refused(
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


def test_folders_of_others_are_not_read(
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
    mine = tmp_path / 'mine.journal'
    JournalWriter(mine).close()
    before = mine.read_bytes()
    (tmp_path / 'link').symlink_to(mine)
    with pytest.raises(BadInput, match='not a regular file'):
        JournalWriter(tmp_path / 'link')
    JournalWriter(tmp_path / 'given.journal').close()
    os.chown(tmp_path / 'given.journal', OTHER, OTHER)
    with pytest.raises(BadInput, match='belongs to another user'):
        JournalWriter(tmp_path / 'given.journal')
    theirs.chmod(0o777)
    with pytest.raises(BadInput, match='Other users may write'):
        JournalWriter(theirs / 'new.journal')
    give_away(theirs)
    with pytest.raises(BadInput, match='belongs to another user'):
        JournalWriter(theirs / 'new.journal')
    assert mine.read_bytes() == before and not list(theirs.iterdir())


def test_a_folder_others_can_replace_is_refused(
    theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = theirs / 'shared' / 'mine'
    folder.mkdir(parents=True)
    shared = folder.parent
    refuse_replaceable(folder, 'run_dir')
    for mode, who in [(0o777, 'Everybody'), (0o2770, 'Every member of the group nogroup')]:
        os.chown(shared, 0, OTHER)
        shared.chmod(mode)
        for path in (folder, shared / 'not-there-yet'):
            with pytest.raises(BadInput, match=rf'{who} may write to {shared} .*chmod \+t'):
                refuse_replaceable(path, 'run_dir')
        shared.chmod(mode | 0o1000)
        refuse_replaceable(folder, 'run_dir')
    os.chown(shared, OTHER, -1)
    for mode in (0o755, 0o1777):  # sticky: its owner still may
        shared.chmod(mode)
        with pytest.raises(BadInput, match=f'{shared} belongs to another user'):
            refuse_replaceable(folder, 'run_dir')
    theirs.chmod(0o700)  # only we can enter it
    refuse_replaceable(folder, 'run_dir')
    theirs.chmod(0o755)
    # In a container, root's folders may look like those of nobody.
    shared.chmod(0o755)
    monkeypatch.setattr(ownership, '_nobody', lambda: OTHER)
    refuse_replaceable(folder, 'run_dir')


def test_a_group_of_one_may_write_above(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a umask of 002, as is usual where each user has a group."""
    (theirs / 'above').mkdir()
    (theirs / 'above').chmod(0o775)
    os.chown(theirs / 'above', OTHER, OTHER)
    monkeypatch.setattr(os, 'geteuid', lambda: OTHER)
    user = pwd.getpwuid(OTHER)
    group = grp.getgrgid(OTHER)
    for name, members, said in [
        (user.pw_name, [], ''),
        (user.pw_name, [user.pw_name], ''),
        (user.pw_name, ['colleague'], 'Every member'),
        ('project', [], 'Every member'),
    ]:
        found = grp.struct_group((name, group.gr_passwd, OTHER, members))
        monkeypatch.setattr(grp, 'getgrgid', lambda number, found=found: found)
        with pytest.raises(BadInput, match=said) if said else nullcontext():
            refuse_replaceable(theirs / 'above' / 'mine', 'run_dir')


def test_a_projects_folder_may_hold_checkpoints_but_nothing_run(
    theirs: Path, tmp_path: Path
) -> None:
    """Each member of the project could put a folder of their own in place of this one."""
    os.chown(theirs, 0, OTHER)
    theirs.chmod(0o2770)
    checkpoints, run_dir = theirs / 'checkpoints', theirs / 'runinfo' / '000'
    run_dir.mkdir(parents=True)
    checkpoints.mkdir(mode=0o700)
    keep_others_out(checkpoints, str(tmp_path))
    with pytest.raises(BadInput, match=r'in place of the run_dir of parsl\.Config'):
        keep_others_out(checkpoints, str(run_dir))
    with pytest.raises(BadInput, match='in place of the folder of the packed environment'):
        PackedEnvironment().prepare(checkpoints)
    archive = tmp_path / 'made-before.tar'
    archive.write_bytes(b'packed')
    command = shlex.split(PackedEnvironment(archive=str(archive)).prepare(checkpoints))
    assert not [word for word in command if word.startswith(str(theirs))]
    checkpoints.rmdir()
    checkpoints.mkdir()
    os.chown(checkpoints, OTHER, OTHER)
    with pytest.raises(BadInput, match='belongs to another user'):
        keep_others_out(checkpoints, str(tmp_path))


def test_links_of_another_user_are_not_followed(theirs: Path) -> None:
    (theirs / 'folder').mkdir()
    (theirs / 'shared').mkdir()
    theirs.joinpath('shared').chmod(0o1777)
    link = theirs / 'shared' / 'link'
    with as_other_user(lambda: link.symlink_to(theirs / 'folder')) as other:
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    (theirs / 'ours').symlink_to('shared/../shared/link')
    for path in (link / 'mine', theirs / 'ours' / 'mine'):
        for group_may in (False, True):
            with pytest.raises(BadInput, match=f'{link}, which .* is a link of another user'):
                refuse_replaceable(path, 'checkpoint_dir', group_may=group_may)
    (theirs / 'loop').symlink_to('loop')
    refuse_replaceable(theirs / 'loop', 'checkpoint_dir')  # it leads nowhere


def test_a_run_dir_where_another_user_has_written_is_refused(theirs: Path, tmp_path: Path) -> None:
    """Parsl makes it with the umask's permissions, and writes into it before it is private."""
    run_dir = theirs / '000'
    run_dir.mkdir()
    run_dir.chmod(0o777)
    with as_other_user((run_dir / 'submit_scripts').mkdir) as other:
        os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    with pytest.raises(BadInput, match=rf'Another user \(id {OTHER}\) has written .*scripts'):
        keep_others_out(tmp_path, str(run_dir))
    (run_dir / 'submit_scripts').rmdir()
    run_dir.chmod(0o777)
    keep_others_out(tmp_path, str(run_dir))
    assert run_dir.stat().st_mode & 0o777 == 0o700
    os.chown(run_dir, OTHER, OTHER)
    with pytest.raises(BadInput, match='run_dir .* belongs to another user'):
        keep_others_out(tmp_path, str(run_dir))


def test_half_open_connections_end_soon_and_messages_still_come(tmp_path: Path) -> None:
    """Each takes a file descriptor of the submitting process."""
    certificates = str(curvezmq.create_certificates(str(tmp_path)))
    server = cc.ControlServer(certificates, '127.0.0.1', (50000, 60000))
    before = open_files()

    def flood() -> None:
        held = [socket.create_connection(('127.0.0.1', server.port)) for _ in range(600)]
        time.sleep(600 + len(held))

    try:
        with as_other_user(flood):
            wait_until(lambda: open_files() >= before + 100, 'they do not take the files')
            begun = time.monotonic()
            wait_until(lambda: open_files() < before + 50, 'they are kept')
            assert time.monotonic() - begun < under_load(cc.HANDSHAKE_MS / 1000 + 1)
            client = cc.ControlClient(['127.0.0.1'], server.port, certificates, ('cnn', 3, 1))
            try:
                client.send(Hello('n1'))
                wait_until(lambda: any(server.receive(0.1)), 'the message does not come')
            finally:
                client.close()
    finally:
        server.close()


def open_files() -> int:
    return len(os.listdir('/proc/self/fd'))
