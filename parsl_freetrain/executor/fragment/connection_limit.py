"""A limit to the connections at a port that have not proved who they are."""

from __future__ import annotations

import ctypes
import logging
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_LOOK_MS = 500


class ConnectionLimit:
    """Keeps new connections out while too many are open that nobody has spoken through.

    Each takes a file descriptor of this process, whoever has opened it, until its handshake has
    failed. At the limit the kernel drops what asks for a new connection. Clients repeat that by
    themselves, so those that may connect only wait. Open connections go on. The connections of
    ``router``, which listens at ``listener``, are counted; ``known`` says through how many somebody
    has spoken; ``ended`` gets the file descriptor of each that has ended, from another thread.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        listener: socket.socket,
        known: Callable[[], int],
        ended: Callable[[int], None],
    ) -> None:
        self._router, self._listener, self._known, self._tell_ended = router, listener, known, ended
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = 2**16 if files == resource.RLIM_INFINITY else files // 4
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name='connections', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop counting. Call it before the router is closed."""
        self._ended.set()
        self._thread.join()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._listener.close()

    def _follow(self) -> None:
        connections: set[int] = set()
        full = False
        while not self._ended.is_set():
            if self._monitor.poll(_LOOK_MS):
                event: Any = recv_monitor_message(self._monitor)
                if event['event'] == zmq.EVENT_ACCEPTED:
                    connections.add(event['value'])
                else:
                    connections.discard(event['value'])
                    self._tell_ended(event['value'])
            unknown = len(connections) - self._known()
            if full != (unknown >= self._most):
                full = not full
                self._admit(not full)
                if full:
                    said = '%d connections to port %d have not said who they are; others wait.'
                    logger.warning(said, unknown, self._listener.getsockname()[1])

    def _admit(self, admit: bool) -> None:
        if admit:
            self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            return
        drop_all = ctypes.create_string_buffer(b'\x06\0\0\0\0\0\0\0', 8)  # BPF: return 0
        program = _Program(1, ctypes.addressof(drop_all))
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (('length', ctypes.c_ushort), ('filter', ctypes.c_void_p))
