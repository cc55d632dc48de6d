"""The warm parent: has torch imported, forks ranks, and ends with its owner. As a template it forks warm parents too.

``python -m parsl_freetrain.training.warm_server --name NAME --owner-pid PID [--listener-fd FD]``
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from parsl_freetrain.training.berths import WARM_VARIABLE, Ahead, Berths, key_of
from parsl_freetrain.training.channel import Channel, is_ours, peer_pid
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.inbox import STOP_SIGNALS
from parsl_freetrain.training.linux import die_with_parent, end_session
from parsl_freetrain.training.liveness import StopWatch
from parsl_freetrain.training.warm import listen
from parsl_freetrain.training.warm_request import ServerRequest

# What a fragment imports sooner or later. torch._dynamo is loaded by the first optimizer that is made.
_TO_IMPORT = ('torch', 'torch.distributed', 'torch.nn.parallel', 'torch.utils.data', 'torch._dynamo', 'torch.profiler',
              'cloudpickle', 'tblib', 'parsl_freetrain.training.rank')
_OWNER_CHECK_S = 0.5
_HEADER_TIMEOUT_S = 2.0
_OWNER_GONE = 3
_LOOK_MS = 1000


def main(argv: list[str] | None = None) -> int:
    """Serve until the owner ends; 0 at once if another process serves this name, 3 if the owner is gone."""
    parser = argparse.ArgumentParser(prog='parsl_freetrain.training.warm_server')
    parser.add_argument('--name', required=True)
    parser.add_argument('--owner-pid', required=True, type=int)
    parser.add_argument('--listener-fd', type=int, help='a socket that listens as NAME already')
    options = parser.parse_args(argv)
    owner = _watch(options.owner_pid)
    if owner is None:
        return _OWNER_GONE
    listener = listen(options.name) if options.listener_fd is None else socket.socket(fileno=options.listener_fd)
    if listener is None:
        return 0
    listener.set_inheritable(False)
    # The scheduler sends SIGTERM to all processes of a job as a notice; the ranks use it, and end with us.
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started_with = dict(os.environ)
    _import_while_owned(owner)
    Nursery(listener, owner, started_with).serve()
    return 0


def _watch(owner_pid: int) -> int | None:
    try:
        return os.pidfd_open(owner_pid)
    except ProcessLookupError:
        print(f'The owner, process {owner_pid}, is gone.', file=sys.stderr)
        return None


@dataclass
class _Child:
    pid: int
    trainer: str
    connection: socket.socket
    client: StopWatch
    hang_s: float
    hung_up: bool = False


class Nursery:
    """Forks a rank, or another warm parent, per connection; single-threaded, and runs no torch operation, so that forks are clean."""

    def __init__(self, listener: socket.socket, owner: int, started_with: Mapping[str, str]) -> None:
        self._listener = listener
        self._owner = owner
        self._started_with = started_with
        self._poll = select.poll()
        self._children: dict[int, _Child] = {}  # by pidfd
        self._servers: dict[int, int] = {}  # process ids of the warm parents forked, by pidfd
        self._by_connection: dict[int, _Child] = {}
        self._berths = Berths()
        self._farewells: dict[int, tuple[socket.socket, int]] = {}  # exit statuses that the client's full socket did not take yet
        self._poll.register(listener, select.POLLIN)
        self._poll.register(owner, select.POLLIN)

    def serve(self) -> None:
        """Until the owner ends."""
        gc.collect()
        gc.freeze()  # a garbage collection in a rank would copy all of the pages that it shares with us
        while True:
            for fd, _ in self._poll.poll(_LOOK_MS if self._children or self._berths else None):
                if fd == self._owner:
                    self._end_all()
                    return
                if fd == self._listener.fileno():
                    if self._admit():
                        self._end_all()
                        return
                elif fd in self._children:
                    self._reap(fd)
                elif fd in self._servers:
                    self._reap_server(fd)
                elif self._berths.ended(fd):
                    self._poll.unregister(fd)
                elif fd in self._by_connection:
                    self._abandoned(fd)
                elif fd in self._farewells:
                    self._say_farewell(fd)
            self._end_forsaken()
            self._berths.let_go()

    def _end_forsaken(self) -> None:
        """Kill ranks whose client is stopped: the executor has lost this node by then, and trains elsewhere."""
        for child in self._children.values():
            if child.client.stopped_s() > child.hang_s:
                os.kill(child.pid, signal.SIGKILL)

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
            self._berths.make_way(header['order']['trainer'])
            if (ahead := self._berths.claim(header, connection)) is not None:
                self._adopt(ahead.pid, ahead.pidfd, connection, header)
                return False
        if kind == 'launch' or (kind == 'ahead' and not self._trains_another(header['order']['trainer'])):
            self._fork(connection, header)
            return False
        if kind == 'serve':
            self._fork_server(connection, header)
            return False
        if kind == 'ping':
            channel.send({'kind': 'ready', 'pid': os.getpid()})
        with suppress(OSError):   # whoever asked may be gone
            if kind == 'keep' and channel.poll(_HEADER_TIMEOUT_S) and self._berths.keep(header, connection):
                channel.send({'kind': 'kept'}, wait=False)
            if kind == 'fetch':
                self._berths.give(header, connection)
        connection.close()
        return kind == 'quit'

    def _trains_another(self, trainer: str) -> bool:
        """Whether the node has gone to another trainer, so that nobody may run ahead here for this one."""
        return any(child.trainer != trainer for child in self._children.values())

    def _fork(self, connection: socket.socket, header: dict[str, Any]) -> None:
        self._flush()
        parent = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if header['kind'] == 'ahead' else (None, None)
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
            self._become_rank(Channel(connection), header, parent, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        pidfd = os.pidfd_open(pid)
        self._poll.register(pidfd, select.POLLIN)
        if ours is None or theirs is None:
            self._adopt(pid, pidfd, connection, header)
            return
        theirs.close()
        connection.close()
        self._berths.add(Ahead(key_of(header), header['order']['trainer'], pid, pidfd, ours, header['place']['log']))

    def _adopt(self, pid: int, pidfd: int, connection: socket.socket, header: Mapping[str, Any]) -> None:
        """A rank that somebody listens to."""
        order = header['order']
        child = _Child(pid, order['trainer'], connection, StopWatch(peer_pid(connection)), float(order['hang_s']))
        self._children[pidfd] = child
        self._by_connection[connection.fileno()] = child
        # Without a wish POLLHUP is still told: the client has gone.
        self._poll.register(connection, 0)

    def _become_rank(self, channel: Channel, header: dict[str, Any], parent: int, berth: socket.socket | None) -> NoReturn:
        status = 1
        try:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.environ[WARM_VARIABLE] = self._listener.getsockname()[1:].decode()
            self._forget()
            channel.send({'kind': 'pid', 'pid': os.getpid()})
            status = _run(channel, header, berth)
        except BaseException:  # a rank must not go on as its parent
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                self._flush()
            # No interpreter shutdown: gloo's threads abort in it.
            os._exit(status)

    def _fork_server(self, connection: socket.socket, header: dict[str, Any]) -> None:
        channel = Channel(connection)
        try:
            request = ServerRequest(**header['request'])
            obstacle = request.obstacle(self._started_with)
            if obstacle:
                print(f'Not fit for {request.name}: {obstacle}', file=sys.stderr)
                channel.send({'kind': 'refused', 'why': obstacle}, wait=False)
            elif not _hung_up(connection):
                self._flush()
                pid = os.fork()
                if pid == 0:
                    self._become_server(channel, request)
                pidfd = os.pidfd_open(pid)
                self._servers[pidfd] = pid
                self._poll.register(pidfd, select.POLLIN)
        except Exception:  # no request may end the template; the client reads the end, and starts one itself
            traceback.print_exc()
        finally:
            channel.close()

    def _become_server(self, channel: Channel, request: ServerRequest) -> NoReturn:
        status = 1
        try:
            os.setsid()
            self._forget()
            request.take_effect(self._started_with)
            status = _serve_as_asked(channel, request)
        except BaseException:  # it must not go on as the template
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                self._flush()
            os._exit(status)

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    def _forget(self) -> None:
        self._listener.close()
        self._berths.forget()
        for pidfd in self._servers:
            os.close(pidfd)
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

    def _reap_server(self, pidfd: int) -> None:
        pid = self._servers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)

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
        self._berths.end()
        # Who forked us is not in our node's session, so that what ends the node does not find what the ranks have started.
        end_session()


def _serve_as_asked(channel: Channel, request: ServerRequest) -> int:
    owner = _watch(request.owner_pid)
    listener = listen(request.name) if owner is not None else None
    if owner is None:
        channel.send({'kind': 'ended', 'status': _OWNER_GONE}, wait=False)
        status = _OWNER_GONE
    else:
        channel.send({'kind': 'serving' if listener is not None else 'taken'}, wait=False)
        status = 0
    channel.close()
    if owner is not None and listener is not None:
        Nursery(listener, owner, request.env).serve()
    return status


def _run(channel: Channel, header: dict[str, Any], sock: socket.socket | None) -> int:
    from parsl_freetrain.training.ahead import Berth
    from parsl_freetrain.training.rank import run_rank
    order, place = FragmentOrder.from_json(header['order']), RankPlace(**header['place'])
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(header['env'])
    payload = channel.recv_bytes()
    if sock is None:
        return run_rank(order, place, payload, channel)
    return run_rank(order, place, payload, Channel(sock), Berth(sock, channel, float(header['wait_s'])))


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
