"""The control channel: JSON messages between the executor and the members of running fragments.

It uses the certificates that Parsl made for its own channels (CurveZMQ), so whoever may not connect
to the interchange may not connect here.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
from collections.abc import Iterator
from typing import Any

import zmq
from parsl import curvezmq
from parsl.addresses import tcp_url

logger = logging.getLogger(__name__)

Message = dict[str, Any]
MemberKey = tuple[str, int, int]   # trainer, fragment, member


def key_of(message: Message) -> MemberKey:
    """Who sent a message."""
    return message['trainer'], message['fragment'], message['member']


class ControlServer:
    """The executor's end. All methods except :meth:`post` belong to one thread.

    Parameters
    ----------
    cert_dir
        Parsl's certificates; None: no encryption, as the executor's ``encrypted=False`` asks for.
    address
        Where to listen; None: on every interface.
    port_range
        First and last port to choose from.
    """

    def __init__(self, cert_dir: str | None, address: str | None, port_range: tuple[int, int]) -> None:
        self._context = curvezmq.ServerContext(cert_dir)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self.port: int = self._router.bind_to_random_port(tcp_url(address or '*'), min_port=port_range[0], max_port=port_range[1])
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)
        self._identities: dict[MemberKey, bytes] = {}

    def post(self, item: Any) -> None:
        """Hand something to the thread that waits in :meth:`receive`; from any thread."""
        self._waiting.put(item)
        try:
            self._wake_writer.send(b'.')
        except BlockingIOError:
            pass  # it has plenty of wake-ups to read already
        except OSError:
            pass  # closed: nobody waits any more

    def receive(self, timeout_s: float) -> Iterator[Any]:
        """Posted items and members' messages (dicts), waiting at most ``timeout_s`` seconds for the first."""
        self._poller.poll(max(0, int(timeout_s * 1000)))
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        while not self._waiting.empty():
            yield self._waiting.get()
        while True:
            try:
                identity, body = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = json.loads(body)
                self._identities[key_of(message)] = identity
            except (ValueError, KeyError, TypeError):
                logger.warning('A message on the control channel was not understood: %r', body[:200])
                continue
            yield message

    def send(self, key: MemberKey, message: Message) -> bool:
        """Send to a member; False if it has not been heard of yet."""
        identity = self._identities.get(key)
        if identity is None:
            return False
        self._router.send_multipart([identity, json.dumps(message).encode()])
        return True

    def forget(self, trainer: str, fragment: int) -> None:
        """The fragment is over."""
        self._identities = {k: v for k, v in self._identities.items() if k[:2] != (trainer, fragment)}

    def close(self) -> None:
        self._router.close()
        self._context.term()  # type: ignore[no-untyped-call]
        self._wake_reader.close()
        self._wake_writer.close()


class ControlClient:
    """A member's end.

    Parameters
    ----------
    addresses, port
        Where the executor may be reached; the first address that answers a TCP connection is used.
    cert_dir
        Parsl's certificates, on the shared file system.
    key
        Who this member is; added to every message.
    """

    def __init__(self, addresses: list[str], port: int, cert_dir: str | None, key: MemberKey) -> None:
        self._context = curvezmq.ClientContext(cert_dir)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, os.urandom(12).hex().encode())
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(tcp_url(reachable(addresses, port), port))
        self._key = dict(zip(('trainer', 'fragment', 'member'), key, strict=True))

    def send(self, message: Message) -> None:
        self.socket.send(json.dumps({**message, **self._key}).encode())

    def receive(self) -> Message | None:
        """The next message, or None if none is waiting."""
        try:
            message: Message = json.loads(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return message

    def close(self) -> None:
        self.socket.close()
        self._context.term()  # type: ignore[no-untyped-call]


def reachable(addresses: list[str], port: int, timeout_s: float = 2.0) -> str:
    """The first address at which ``port`` answers.

    Raises
    ------
    ConnectionError
        If none does.
    """
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout_s):
                return address
        except OSError:
            continue
    raise ConnectionError(
        f'{socket.gethostname()} cannot reach the submitting process at port {port} of any of {", ".join(addresses)}; '
        f'give the executor an address= that compute nodes can reach.')
