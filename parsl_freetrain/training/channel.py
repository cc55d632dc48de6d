"""Messages between a rank and the process that watches over it, on one machine."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

_PACKET_BYTES = 60_000  # a packet must fit into the socket's buffer, of which the kernel guarantees little
_ALONE, _MORE, _LAST = b'!', b'+', b'.'


class Channel:
    """Whole messages over a connected ``SOCK_SEQPACKET`` socket.

    The kernel keeps packets whole, so a sender that is killed within a long message leaves the other
    end at most an unfinished message, which is dropped when a short one (from whoever else holds the socket) follows.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """For ``select`` and ``multiprocessing.connection.wait``: readable when a message (or the end) can be read."""
        return self._socket.fileno()

    def peer_pid(self) -> int:
        """Process id of the other end, or of who listened there, as the kernel knows it."""
        return peer_pid(self._socket)

    def send(self, message: Mapping[str, Any], *, wait: bool = True) -> bool:
        """Send a JSON document; False if the other end is gone.

        Parameters
        ----------
        message
            What ``json.dumps`` takes.
        wait
            False: a message that cannot be sent at once is dropped (False is returned).
        """
        return self.send_bytes(json.dumps(message).encode(), wait=wait)

    def send_bytes(self, data: bytes, *, wait: bool = True) -> bool:
        """As :meth:`send`; what is sent with ``wait=False`` must be short (below 60,000 bytes)."""
        if len(data) <= _PACKET_BYTES:
            return self._send_packet(_ALONE + data, 0 if wait else socket.MSG_DONTWAIT)
        if not wait:
            return False
        view = memoryview(data)
        for start in range(0, len(view), _PACKET_BYTES):
            flag = _LAST if start + _PACKET_BYTES >= len(view) else _MORE
            if not self._send_packet(flag + view[start:start + _PACKET_BYTES], 0):
                return False
        return True

    def recv(self) -> dict[str, Any]:
        """The next JSON document; waits for it.

        Raises
        ------
        EOFError
            If the other end is gone.
        """
        message = json.loads(self.recv_bytes())
        assert isinstance(message, dict)
        return message

    def recv_bytes(self) -> bytes:
        """The next message as bytes; raises EOFError as :meth:`recv`."""
        parts: list[bytes] = []
        while True:
            try:
                packet = self._socket.recv(_PACKET_BYTES + 1)
            except ConnectionError:
                # Told once, ahead of what the other end had sent before it went without reading all of ours.
                packet = self._socket.recv(_PACKET_BYTES + 1)
            if not packet:
                raise EOFError('The other end of the channel is gone.')
            if packet[:1] == _ALONE:
                return packet[1:]
            parts.append(packet[1:])
            if packet[:1] == _LAST:
                return b''.join(parts)

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message or the end can be read within ``timeout_s`` seconds."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """May be called more than once."""
        self._socket.close()

    def _send_packet(self, packet: bytes, flags: int) -> bool:
        try:
            self._socket.send(packet, flags | socket.MSG_NOSIGNAL)
        except (ConnectionError, BlockingIOError):
            return False
        return True


def peer_pid(sock: socket.socket) -> int:
    """Process id of the other end at the time of the connection, as the kernel knows it."""
    return int(struct.unpack('3i', sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize('3i')))[0])


def peer_uid(sock: socket.socket) -> int:
    """User id of the process at the other end, as the kernel knows it."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize('3i'))
    return int(struct.unpack('3i', credentials)[1])


def is_ours(sock: socket.socket) -> bool:
    """Whether the other end runs as the same user as we do."""
    return peer_uid(sock) == os.geteuid()
