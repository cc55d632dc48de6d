"""Messages between the executor and members, with Parsl's certificates (CurveZMQ)."""

import ctypes
import errno
import logging
import os
import queue
import random
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import zmq
from parsl import curvezmq
from parsl.addresses import tcp_url
from zmq.utils.monitor import recv_monitor_message

from parsl_freetrain.training.spec import messages as msg

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_LOOK_MS = 500
HANDSHAKE_MS = 3000  # milliseconds after which a connection ends that has not proved who it is
SEND_S = 15  # seconds for which a member waits for its connection to take a message

MemberKey = tuple[str, int, int]  # trainer, fragment, member


class MemberDisconnected(NamedTuple):
    """The connection of a fragment's member has ended. It may come back by itself."""

    trainer: str
    fragment: int
    member: int


class _ConnectionEnded(NamedTuple):
    fd: int


class ControlServer:
    """The executor's end, of one thread but for :meth:`post`; no ``cert_dir``: no encryption.
    A thread of its own keeps out new connections while too many are silent: each costs a
    descriptor.
    """

    def __init__(
        self, cert_dir: str | None, address: str | None, port_range: tuple[int, int]
    ) -> None:
        self._context = curvezmq.ServerContext(cert_dir)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._listener = _listener(address or '', range(*port_range))
        self.port: int = self._listener.getsockname()[1]
        self._router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        self._router.bind(tcp_url(address or '*', self.port))
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._identities: dict[MemberKey, bytes] = {}
        # Of each fragment: the file descriptors of its members.
        self._members: dict[tuple[str, int], dict[MemberKey, int]] = {}
        self._connections: dict[int, MemberKey] = {}  # by file descriptor
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_unknown = 2**16 if files == resource.RLIM_INFINITY else files // 4
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='connections', daemon=True)
        self._thread.start()
        what = 'a member of a fragment'
        self._decoder: msg.Decoder[msg.FromMember] = msg.Decoder(msg.FromMember, what)

    def post(self, item: Any) -> None:
        self._waiting.put(item)
        # Enough wake-ups are pending already, or it is closed and no thread waits.
        with suppress(OSError):
            self._wake_writer.send(b'.')

    def posted(self) -> Iterator[Any]:
        while not self._waiting.empty():
            yield self._waiting.get()

    def receive(self, timeout_s: float) -> Iterator[Any]:
        """Messages, posted items, then ended connections; waits ``timeout_s`` for the first."""
        self._poller.poll(max(0, int(timeout_s * 1000)))
        with suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                pass
        posted = list(self.posted())
        yield from self._messages()
        yield from (item for item in posted if not isinstance(item, _ConnectionEnded))
        for item in posted:
            if isinstance(item, _ConnectionEnded) and (key := self._connections.pop(item.fd, None)):
                yield MemberDisconnected(*key)

    def _messages(self) -> Iterator[msg.FromMember]:
        while True:
            try:
                identity, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = self._decoder.decode(b''.join(frame.bytes for frame in frames))
            if message is not None:
                sender, fd = message.sender, int(frames[-1]['__fd'])
                self._identities[sender], self._connections[fd] = identity.bytes, sender
                self._members.setdefault(sender[:2], {})[sender] = fd
                yield message

    def _watch(self) -> None:
        connections: set[int] = set()
        full = False
        while not self._over.is_set():
            if self._monitor.poll(_LOOK_MS):
                event: Any = recv_monitor_message(self._monitor)
                if event['event'] == zmq.EVENT_ACCEPTED:
                    connections.add(event['value'])
                else:
                    connections.discard(event['value'])
                    self._connection_ended(event['value'])
            unknown = len(connections) - len(self._connections)
            if full != (unknown >= self._most_unknown):
                full = not full
                self._admit(not full)
                if full:
                    said = '%d connections to port %d have not said who they are; others wait.'
                    logger.warning(said, unknown, self.port)

    def _connection_ended(self, fd: int) -> None:
        if fd in self._connections:
            self.post(_ConnectionEnded(fd))

    def _admit(self, admit: bool) -> None:
        if admit:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            return
        drop_all = ctypes.create_string_buffer(b'\x06\0\0\0\0\0\0\0', 8)  # BPF: return 0
        program = struct.pack('HP', 1, ctypes.addressof(drop_all))  # struct sock_fprog
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def send(self, key: MemberKey, message: msg.ToMember) -> bool:
        """Send to a member; False if it has not reported yet."""
        identity = self._identities.get(key)
        if identity is None:
            return False
        self._router.send_multipart([identity, msg.encode(message)])
        return True

    def forget(self, trainer: str, fragment: int) -> None:
        for key, fd in self._members.pop((trainer, fragment), {}).items():
            del self._identities[key]
            if self._connections.get(fd) == key:
                del self._connections[fd]

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._listener.close()
        self._router.close()
        self._context.term()  # type: ignore[no-untyped-call]
        self._wake_reader.close()
        self._wake_writer.close()


class ControlClient:
    """A member's end, by the first of ``addresses`` that answers; adds ``key`` to every message."""

    def __init__(
        self, addresses: list[str], port: int, cert_dir: str | None, key: MemberKey
    ) -> None:
        self._context = curvezmq.ClientContext(cert_dir)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(12).hex().encode())
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDTIMEO, 1000 * SEND_S)
        theirs, self.address = reachable(addresses, port)
        self.socket.connect(tcp_url(theirs, port))
        self._key = key
        self._decoder: msg.Decoder[msg.ToMember] = msg.Decoder(msg.ToMember, 'the executor')

    def send(self, message: msg.MemberMessage) -> None:
        try:
            self.socket.send(msg.encode(msg.FromMember(*self._key, message)))
        except zmq.Again:
            said = f'The executor has taken no message of this node for {SEND_S} s.'
            raise ConnectionError(said) from None

    def receive(self) -> msg.ToMember | None:
        while True:
            try:
                body = b''.join(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return None
            message = self._decoder.decode(body)
            if message is not None:
                return message

    def close(self) -> None:
        self.socket.close()
        self._context.term()  # type: ignore[no-untyped-call]


def _listener(address: str, ports: range) -> socket.socket:
    """Listen at a free port, tried in random order; its backlog comes beyond the limit."""
    for port in random.sample(ports, len(ports)):
        try:
            return socket.create_server((address, port), backlog=100)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f'no port from {ports.start} to {ports.stop - 1} is free')


def reachable(addresses: list[str], port: int, timeout_s: float = 2.0) -> tuple[str, str]:
    """The first address at which ``port`` answers, and the own one it sees; or ConnectionError."""
    # At its limit of connections the port does not answer for some seconds.
    for limit_s, address in product((timeout_s, 5 * timeout_s), addresses):
        try:
            with socket.create_connection((address, port), limit_s) as connection:
                return address, str(connection.getsockname()[0])
        except OSError:
            continue
    raise ConnectionError(
        f'{socket.gethostname()} cannot reach the submitting process at port {port} of any of '
        f'{", ".join(addresses)}; give the executor an address= that compute nodes can reach.'
    )
