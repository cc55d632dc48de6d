"""The warm parent: has torch imported, forks ranks, and ends with its owner.

``python -m parsl_freetrain.training.warm_server --name NAME --owner-pid PID``
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from parsl_freetrain.training.channel import Channel, is_ours
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.inbox import STOP_SIGNALS
from parsl_freetrain.training.linux import die_with_parent
from parsl_freetrain.training.warm import address_of

# What a fragment imports sooner or later. torch._dynamo is loaded by the first optimizer that is made.
_TO_IMPORT = ('torch', 'torch.distributed', 'torch.nn.parallel', 'torch.utils.data', 'torch._dynamo', 'torch.profiler',
              'cloudpickle', 'tblib', 'parsl_freetrain.training.rank')
_OWNER_CHECK_S = 0.5
_HEADER_TIMEOUT_S = 2.0
_OWNER_GONE = 3


def main(argv: list[str] | None = None) -> int:
    """Serve until the owner ends; 0 at once if another process serves this name, 3 if the owner is gone."""
    parser = argparse.ArgumentParser(prog='parsl_freetrain.training.warm_server')
    parser.add_argument('--name', required=True)
    parser.add_argument('--owner-pid', required=True, type=int)
    options = parser.parse_args(argv)
    try:
        owner = os.pidfd_open(options.owner_pid)
    except ProcessLookupError:
        print(f'The owner, process {options.owner_pid}, is gone.', file=sys.stderr)
        return _OWNER_GONE
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address_of(options.name))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return 0
        raise
    # Clients may connect from now on; they wait in the queue until torch is there.
    listener.listen(128)
    # The scheduler sends SIGTERM to all processes of a job as a notice; the ranks use it, and end with us.
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _import_while_owned(owner)
    Nursery(listener, owner).serve()
    return 0


@dataclass
class _Child:
    pid: int
    connection: socket.socket
    hung_up: bool = False


class Nursery:
    """Forks a rank per connection; single-threaded, and runs no torch operation, so that forks are clean."""

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener = listener
        self._owner = owner
        self._poll = select.poll()
        self._children: dict[int, _Child] = {}  # by pidfd
        self._by_connection: dict[int, _Child] = {}
        self._farewells: dict[int, tuple[socket.socket, int]] = {}  # exit statuses that the client's full socket did not take yet
        self._poll.register(listener, select.POLLIN)
        self._poll.register(owner, select.POLLIN)

    def serve(self) -> None:
        """Until the owner ends."""
        gc.collect()
        gc.freeze()  # a garbage collection in a rank would copy all of the pages that it shares with us
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._owner:
                    self._end_all()
                    return
                if fd == self._listener.fileno():
                    if self._admit():
                        self._end_all()
                        return
                elif fd in self._children:
                    self._reap(fd)
                elif fd in self._by_connection:
                    self._abandoned(fd)
                elif fd in self._farewells:
                    self._say_farewell(fd)

    def _admit(self) -> bool:
        connection, _ = self._listener.accept()
        if not is_ours(connection):
            connection.close()
            return False
        channel = Channel(connection)
        try:
            header = channel.recv() if channel.poll(_HEADER_TIMEOUT_S) else {}
        except (EOFError, ValueError):
            header = {}
        kind = header.get('kind')
        if kind == 'launch':
            self._fork(connection, header)
            return False
        if kind == 'ping':
            channel.send({'kind': 'ready', 'pid': os.getpid()})
        connection.close()
        return kind == 'quit'

    def _fork(self, connection: socket.socket, header: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # A notice that arrives before the rank can honour it stays pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError:  # too many processes; the client reads the end
            traceback.print_exc()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            connection.close()
            return
        if pid == 0:
            self._become_rank(Channel(connection), header, parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        child = _Child(pid, connection)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = child
        self._by_connection[connection.fileno()] = child
        self._poll.register(pidfd, select.POLLIN)
        # Without a wish POLLHUP is still told: the client has gone.
        self._poll.register(connection, 0)

    def _become_rank(self, channel: Channel, header: dict[str, Any], parent: int) -> NoReturn:
        status = 1
        try:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            self._forget()
            channel.send({'kind': 'pid', 'pid': os.getpid()})
            status = _run(channel, header)
        except BaseException:  # a rank must not go on as its parent
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            # No interpreter shutdown: gloo's threads abort in it.
            os._exit(status)

    def _forget(self) -> None:
        self._listener.close()
        os.close(self._owner)
        for pidfd, child in self._children.items():
            os.close(pidfd)
            child.connection.close()
        for connection, _ in self._farewells.values():
            connection.close()

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        fd = child.connection.fileno()
        del self._by_connection[fd]
        if child.hung_up:
            child.connection.close()
            return
        self._farewells[fd] = (child.connection, os.waitstatus_to_exitcode(status))
        self._poll.modify(fd, select.POLLOUT)
        self._say_farewell(fd)

    def _say_farewell(self, fd: int) -> None:
        connection, status = self._farewells[fd]
        channel = Channel(connection)
        if channel.send({'kind': 'exit', 'status': status}, wait=False) or _hung_up(connection):
            del self._farewells[fd]
            self._poll.unregister(fd)
            connection.close()

    def _abandoned(self, fd: int) -> None:
        child = self._by_connection[fd]
        if not _hung_up(child.connection):
            return  # an event of an earlier connection of the same number
        child.hung_up = True
        self._poll.unregister(fd)
        os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own

    def _end_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)


def _run(channel: Channel, header: dict[str, Any]) -> int:
    from parsl_freetrain.training.rank import run_rank
    order, place = FragmentOrder(**header['order']), RankPlace(**header['place'])
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(header['env'])
    return run_rank(order, place, channel.recv_bytes(), channel)


def _hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _import_while_owned(owner: int) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN)

    def check(*_: object) -> None:
        if poll.poll(0):
            os._exit(_OWNER_GONE)

    # The import takes seconds, on a busy parallel file system minutes; a thread that watches would be lost in forks.
    signal.signal(signal.SIGALRM, check)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _OWNER_CHECK_S, _OWNER_CHECK_S)
    for module in _TO_IMPORT:
        try:
            importlib.import_module(module)
        except ImportError:
            # Private or optional modules may go; without the others there is nothing to serve.
            if module not in ('torch._dynamo', 'torch.profiler'):
                raise
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == '__main__':
    sys.exit(main())
