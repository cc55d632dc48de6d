"""A node's fork server: imports torch, forks ranks (a template: servers), ends with its owner."""

import argparse
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from parsl_freetrain.host.files import open_log
from parsl_freetrain.host.processes import SECOND, end_me_first
from parsl_freetrain.training.comm.inbox import STOP_SIGNALS
from parsl_freetrain.training.process import lazy_dynamo
from parsl_freetrain.training.process import standby_slots as standby
from parsl_freetrain.training.process.channel import Channel, is_ours, listen
from parsl_freetrain.training.process.fork_request import obstacle, take_effect
from parsl_freetrain.training.process.linux import adopt_orphans, die_with_parent, end_descendants
from parsl_freetrain.training.process.standby_slots import RankChildren
from parsl_freetrain.training.spec import fork_messages as fork
from parsl_freetrain.training.spec.messages import Decoder, Outcome, RankError, RankPid, ToRank

# What every fragment imports sooner or later.
_TO_IMPORT = (
    'torch',
    'torch.distributed',
    'torch.nn.parallel',
    'torch.utils.data',
    'cloudpickle',
    'tblib',
    'numpy.random',  # numpy imports it at its first use, and each rank seeds it
    'parsl_freetrain.training.loop.rank',
)
# FSDP2 imports the compiler, which takes as long as torch.
_FOR_SHARDED = ('parsl_freetrain.training.steps.sharded', 'torch._dynamo.utils')
_OWNER_CHECK_S = 0.5
_REQUEST_TIMEOUT_S = 2.0
_OWNER_GONE = 3
_LOOK_MS = 1000


def main(argv: list[str] | None = None) -> int:
    """Returns 0 at once if another process serves this name, 3 if the owner is gone."""
    parser = argparse.ArgumentParser(prog='parsl_freetrain.training.process.fork_server')
    parser.add_argument('--name', required=True)
    parser.add_argument('--owner-pid', required=True, type=int)
    parser.add_argument('--listener-fd', type=int, help='a socket that listens as NAME already')
    options = parser.parse_args(argv)
    owner = _watch(options.owner_pid)
    if owner is None:
        return _OWNER_GONE
    fd = options.listener_fd
    listener = listen(options.name) if fd is None else socket.socket(fileno=fd)
    if listener is None:
        return 0
    listener.set_inheritable(False)
    # SIGTERM to all processes of a job is a notice, which ranks use; they end with this process.
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_me_first(SECOND)
    started_with = dict(os.environ)
    _import_while_owned(owner)
    ForkServer(listener, owner, started_with).serve()
    return 0


def _watch(owner_pid: int) -> int | None:
    try:
        return os.pidfd_open(owner_pid)
    except ProcessLookupError:
        print(f'The owner, process {owner_pid}, is gone.', file=sys.stderr)
        return None


class ForkServer:
    """Forks a rank or a fork server per connection; one thread, no torch: its forks are clean."""

    def __init__(
        self, listener: socket.socket, owner: int, started_with: Mapping[str, str]
    ) -> None:
        self._listener, self._owner, self._started_with = listener, owner, started_with
        self._poll = select.poll()
        who = 'a client of the fork server'
        self._requests: Decoder[fork.ForkRequest] = Decoder(fork.ForkRequest, who)
        self._ranks = RankChildren(self._poll)
        self._standby = standby.StandbySlots()
        self._servers: dict[int, int] = {}  # process ids of forked fork servers, by pidfd
        self._devices: int | None = None  # asked for by the first client
        self._poll.register(listener, select.POLLIN)
        self._poll.register(owner, select.POLLIN)

    def serve(self) -> None:
        adopt_orphans()
        gc.collect()
        # a garbage collection in a rank would copy all pages that it shares with this process
        gc.freeze()
        while True:
            for fd, _ in self._poll.poll(_LOOK_MS if self._ranks or self._standby else None):
                if fd == self._owner or (fd == self._listener.fileno() and not self._admit()):
                    # With what ranks have started. Fork servers have their own owners.
                    end_descendants(self._servers.values())
                    return
                if fd in self._servers:
                    self._reap_server(fd)
                elif self._standby.ended(fd):
                    self._poll.unregister(fd)
                else:
                    self._ranks.handle(fd)
            if self._ranks.killed and not self._ranks:
                self._ranks.killed = False
                self._end_orphans()
            self._ranks.end_forsaken()
            self._standby.drop_old_states()
            self._standby.dismiss_forsaken(self._ranks.trainers(), time.monotonic())

    def _admit(self) -> bool:
        """Serve the next connection; False if it asks this server to end."""
        connection, _ = self._listener.accept()
        if not is_ours(connection):
            connection.close()
            return True
        channel = Channel(connection, self._requests)
        try:
            request = channel.recv() if channel.poll(_REQUEST_TIMEOUT_S) else None
        except EOFError:
            request = None
        match request:
            case fork.Launch(order=order, wait_s=None):
                self._standby.make_way(order.trainer)
                if (rank := self._standby.claim(request, channel)) is not None:
                    self._ranks.add(rank.pid, rank.pidfd, channel, order)
                else:
                    self._fork(channel, request)
                return True
            case fork.Launch(order=order) if self._ranks.trainers() <= {order.trainer}:
                self._fork(channel, request)
                return True
            case fork.ForkServerWanted():
                self._fork_server(channel, request)
            case fork.Ping():
                channel.send(fork.Ready(os.getpid(), self._count_devices()))
            case fork.OfferState() if self._standby.wants(request):
                channel.send(fork.StateWanted(), wait=False)
            case fork.KeepState():
                with suppress(OSError):  # the client may be gone
                    if channel.poll(_REQUEST_TIMEOUT_S) and self._standby.keep(request, channel):
                        channel.send(fork.StateKept(), wait=False)
            case fork.FetchState():
                with suppress(OSError):
                    self._standby.give(request, channel)
        channel.close()
        return not isinstance(request, fork.Quit)

    def _count_devices(self) -> int:
        if self._devices is None:
            from parsl_freetrain.training.comm.devices import count_visible

            self._devices = count_visible()
        return self._devices

    def _fork(self, channel: Channel[fork.ForkRequest], request: fork.Launch) -> None:
        self._import_for(request)
        self._flush()
        parent = os.getpid()
        ours = theirs = None
        if request.wait_s is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A notice that arrives before the rank can handle it stays pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
        except OSError:  # too many processes; the client sees the end of the connection
            traceback.print_exc()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            channel.close()
            return
        if pid == 0:
            self._become(self._rank, channel, request, parent, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        pidfd = os.pidfd_open(pid)
        self._poll.register(pidfd, select.POLLIN)
        if ours is None or theirs is None:
            self._ranks.add(pid, pidfd, channel, request.order)
            return
        theirs.close()
        channel.close()
        key, trainer, log = standby.key_of(request), request.order.trainer, request.place.log
        waiting = Channel(ours, self._requests)
        self._standby.add(standby.StandbyRank(key, trainer, pid, pidfd, waiting, log))

    def _import_for(self, request: fork.Launch) -> None:
        if not request.order.spec.sharded or sys.modules.keys() >= set(_FOR_SHARDED):
            return
        for module in _FOR_SHARDED:
            importlib.import_module(module)
        gc.freeze()

    def _rank(
        self,
        channel: Channel[fork.ForkRequest],
        request: fork.Launch,
        parent: int,
        waits: socket.socket | None,
    ) -> int:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        end_me_first()
        os.environ[standby.FORK_SERVER_VARIABLE] = self._listener.getsockname()[1:].decode()
        self._forget()
        channel.send(RankPid(os.getpid()))
        return _run(channel, request, waits)

    def _become(self, what: Callable[..., int], *arguments: Any) -> NoReturn:
        """In a forked process, which must not go on as its parent."""
        status = 1
        try:
            status = what(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                self._flush()
            # No interpreter shutdown: gloo's threads abort in it.
            os._exit(status)

    def _fork_server(
        self, channel: Channel[fork.ForkRequest], request: fork.ForkServerWanted
    ) -> None:
        try:
            if why := obstacle(request, self._started_with):
                print(f'Not fit for {request.name}: {why}', file=sys.stderr)
                channel.send(fork.Refused(why), wait=False)
            elif not channel.hung_up():
                self._flush()
                pid = os.fork()
                if pid == 0:
                    self._become(self._server, channel, request)
                pidfd = os.pidfd_open(pid)
                self._servers[pidfd] = pid
                self._poll.register(pidfd, select.POLLIN)
        except Exception:  # the client sees the connection end, and starts a fork server itself
            traceback.print_exc()

    def _server(self, channel: Channel[fork.ForkRequest], request: fork.ForkServerWanted) -> int:
        if os.getsid(0) == os.getppid():  # the template leads one
            os.setsid()
        self._forget()
        take_effect(request, self._started_with)
        return _serve_as_asked(channel, request)

    def _flush(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()

    def _forget(self) -> None:
        """In a forked process: close what belongs to this server."""
        self._listener.close()
        self._standby.forget()
        self._ranks.forget()
        for pidfd in self._servers:
            os.close(pidfd)
        os.close(self._owner)

    def _reap_server(self, pidfd: int) -> None:
        pid = self._servers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        self._end_orphans()  # its ranks, if it was killed, and what they had started

    def _end_orphans(self) -> None:
        end_descendants({*self._servers.values(), *self._ranks.pids(), *self._standby.pids()})


def _serve_as_asked(channel: Channel[fork.ForkRequest], request: fork.ForkServerWanted) -> int:
    owner = _watch(request.owner_pid)
    if owner is None:
        channel.send(fork.ForkServerEnded(_OWNER_GONE), wait=False)
        channel.close()
        return _OWNER_GONE
    listener = listen(request.name)
    channel.send(fork.Serving(), wait=False)
    channel.close()
    if listener is not None:  # otherwise another process serves this name
        ForkServer(listener, owner, request.env).serve()
    return 0


def _run(
    channel: Channel[fork.ForkRequest], request: fork.Launch, waits: socket.socket | None
) -> int:
    from parsl_freetrain.training.loop.rank import Rank, StandbyPlace

    order, place = request.order, request.place
    try:
        log = open_log(place.log)
    except OSError as error:
        said = RankError(type(error).__name__, f'its log cannot be written: {error}', '')
        channel.send(Outcome('storage', error=said))
        return 1
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(request.env)
    payload = channel.recv_bytes()
    decoder: Decoder[ToRank] = Decoder(ToRank, 'the node agent')
    if waits is None or request.wait_s is None:
        return Rank(order, place, channel.receiving(decoder)).run(payload)
    waiting = Channel(waits, decoder)
    return Rank(order, place, waiting, StandbyPlace(waiting, channel, request.wait_s)).run(payload)


def _import_while_owned(owner: int) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN)

    def check(*_: object) -> None:
        if poll.poll(0):
            os._exit(_OWNER_GONE)

    # The import takes seconds or minutes; a thread that watches would not survive forks.
    signal.signal(signal.SIGALRM, check)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, _OWNER_CHECK_S, _OWNER_CHECK_S)
    for module in _TO_IMPORT:
        importlib.import_module(module)
    lazy_dynamo.install()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


if __name__ == '__main__':
    sys.exit(main())
