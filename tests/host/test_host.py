"""Private files are private and whole; processes are told apart; back-off grows up to a limit."""

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host import files
from parsl_freetrain.host.clocks import Backoff
from parsl_freetrain.host.processes import is_stopped, process_ids, start_of, status, tcp_sockets
from tests.support.programs import Program


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_private_and_never_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / 'new'
    files.write_new(path, b'one')
    assert (path.read_bytes(), mode_of(path)) == (b'one', 0o600)
    with pytest.raises(FileExistsError):
        files.write_new(path, b'two')
    link = tmp_path / 'link'
    link.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(FileExistsError):
        files.write_new(link, b'two')
    assert not (tmp_path / 'elsewhere').exists()


def test_replacing_a_file_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / 'target', tmp_path / 'link'
    target.write_text('theirs')
    link.symlink_to(target)
    files.replace(link, b'ours', mode=0o700)
    assert (link.read_bytes(), link.is_symlink(), mode_of(link)) == (b'ours', False, 0o700)
    assert target.read_text() == 'theirs'
    assert sorted(os.listdir(tmp_path)) == ['link', 'target']


def test_a_failed_replacement_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / 'folder').mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace(tmp_path / 'folder', b'')
    assert os.listdir(tmp_path) == ['folder']


def test_only_what_nobody_else_can_write_is_read(tmp_path: Path) -> None:
    path, link = tmp_path / 'file', tmp_path / 'link'
    files.write_new(path, b'12345')
    assert files.read(path, 3) == b'123'
    link.symlink_to(path)
    with pytest.raises(BadInput, match='cannot be read'):
        files.read(link, 3)
    path.chmod(0o620)
    with pytest.raises(BadInput, match='nobody else can read or write'):
        files.read(path, 3)
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / 'none', 3)


def test_logs_are_appended_to(tmp_path: Path) -> None:
    for text in (b'a', b'b'):
        fd = files.open_log(tmp_path / 'log')
        os.write(fd, text)
        os.close(fd)
    assert ((tmp_path / 'log').read_bytes(), mode_of(tmp_path / 'log')) == (b'ab', 0o600)


def test_a_process_is_known_while_it_lives() -> None:
    # A name with a parenthesis and spaces is the hard case of /proc/PID/stat.
    code = "open('/proc/self/comm', 'w').write(') R 1 2'); print(flush=True); input()"
    with Program([sys.executable, '-c', code], start_new_session=True) as process:
        process.said()
        found = status(process.pid)
        assert found is not None
        assert found.alive
        assert found.session == process.pid
        assert start_of(process.pid) == found.start != start_of(os.getpid())
        assert process.pid in process_ids()
        assert not is_stopped(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert start_of(process.pid) == ''  # a zombie
    assert status(process.pid) is None


def test_tcp_sockets_are_found_and_left_open() -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        assert server.getsockname() in [sock.getsockname() for sock in tcp_sockets()]
        assert server.fileno() not in [sock.fileno() for sock in tcp_sockets()]
        assert server.getsockname()


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.failed() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.failures == 5
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.failed() == 1.0


def test_a_device_is_written_to_not_replaced() -> None:
    files.replace(Path('/dev/null'), b'nothing')
    assert Path('/dev/null').is_char_device()
