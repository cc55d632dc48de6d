"""Messages on one machine, and its fork servers' addresses: abstract sockets by name and user."""

import errno
import hashlib
import os
import select
import socket
import struct
from typing import Generic, TypeVar

from msgspec import Struct

from parsl_freetrain.training.spec.messages import Decoder, encode

T = TypeVar('T')
U = TypeVar('U')

# A packet must fit into the socket's buffer, of which the kernel guarantees only a small size.
_PACKET_BYTES = 60_000
_ALONE, _MORE, _LAST = b'!', b'+', b'.'
_BACKLOG = 128


class Channel(Generic[T]):
    """Whole messages over ``SOCK_SEQPACKET``; what a killed sender left unfinished is dropped."""

    def __init__(self, sock: socket.socket, decoder: Decoder[T]) -> None:
        self._socket, self._decoder = sock, decoder

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Of the other end, or of the process that listened there, according to the kernel."""
        return _credentials(self._socket)[0]

    def send(self, message: Struct, *, wait: bool = True) -> bool:
        """False if the other end is gone, or it was dropped: it had to wait, without ``wait``."""
        return self.send_bytes(encode(message), wait=wait)

    def send_bytes(self, data: bytes, *, wait: bool = True) -> bool:
        """As :meth:`send`; with ``wait=False`` the data must be shorter than 60,000 bytes."""
        if len(data) <= _PACKET_BYTES:
            return self._send_packet(_ALONE + data, 0 if wait else socket.MSG_DONTWAIT)
        if not wait:
            return False
        view = memoryview(data)
        for start in range(0, len(view), _PACKET_BYTES):
            flag = _LAST if start + _PACKET_BYTES >= len(view) else _MORE
            if not self._send_packet(flag + view[start : start + _PACKET_BYTES], 0):
                return False
        return True

    def recv(self) -> T | None:
        """None if it is not an expected message. Raises EOFError if the other end is gone."""
        return self._decoder.decode(self.recv_bytes())

    def recv_bytes(self) -> bytes:
        parts: list[bytes] = []
        while True:
            try:
                packet = self._socket.recv(_PACKET_BYTES + 1)
            except ConnectionError:
                # The kernel reports this once, before data sent by an end that closed early.
                packet = self._socket.recv(_PACKET_BYTES + 1)
            if not packet:
                raise EOFError('The other end of the channel is gone.')
            if packet[:1] == _ALONE:
                return packet[1:]
            parts.append(packet[1:])
            if packet[:1] == _LAST:
                return b''.join(parts)

    def send_fd(self, fd: int, data: bytes = b'.', *, wait: bool = True) -> None:
        socket.send_fds(self._socket, [data], [fd], 0 if wait else socket.MSG_DONTWAIT)

    def recv_fd(self, size: int = 1, *, wait: bool = True) -> tuple[bytes, int | None]:
        """At most ``size`` bytes and the file descriptor that came with them; raises OSError."""
        data, fds, _, _ = socket.recv_fds(self._socket, size, 1, 0 if wait else socket.MSG_DONTWAIT)
        return data, fds[0] if fds else None

    def become(self, fd: int) -> None:
        """Use the connection of this file descriptor from now on, and close the descriptor."""
        os.dup2(fd, self._socket.fileno(), inheritable=False)
        os.close(fd)

    def receiving(self, decoder: Decoder[U]) -> 'Channel[U]':
        return Channel(self._socket, decoder)

    def hung_up(self) -> bool:
        """Whether the other end is gone, even if there are unread messages."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message or the end can be read within ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        self._socket.close()

    def _send_packet(self, packet: bytes, flags: int) -> bool:
        try:
            self._socket.send(packet, flags | socket.MSG_NOSIGNAL)
        except (ConnectionError, BlockingIOError):
            return False
        return True


def _credentials(sock: socket.socket) -> tuple[int, ...]:
    """Process, user and group of the other end when it connected, according to the kernel."""
    size = struct.calcsize('3i')
    return struct.unpack('3i', sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))


def is_ours(sock: socket.socket) -> bool:
    """Whether the other end runs as the same user as this process."""
    return _credentials(sock)[1] == os.geteuid()


def address_of(name: str) -> bytes:
    """The abstract socket address of the fork server ``name``; one per user."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f'\0parsl-freetrain-{os.geteuid()}-{digest}'.encode()


def listen(name: str) -> socket.socket | None:
    """None if another process does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address_of(name))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    # Clients may connect from now on; they wait in the queue until torch is imported.
    listener.listen(_BACKLOG)
    return listener


def connect(name: str) -> socket.socket | None:
    """None if no fork server of this name listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(address_of(name))
    except ConnectionError:
        sock.close()
        return None
    return sock
