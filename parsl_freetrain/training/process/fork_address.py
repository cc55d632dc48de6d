"""The address of a node's fork server: an abstract socket, one per name and user."""

from __future__ import annotations

import errno
import hashlib
import os
import socket

_BACKLOG = 128


def address_of(name: str) -> bytes:
    """The abstract socket address of the fork server ``name``; one per user."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f'\0parsl-freetrain-{os.geteuid()}-{digest}'.encode()


def listen(name: str) -> socket.socket | None:
    """Listen as the fork server ``name``; None if another process does."""
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
    """Connect to the fork server ``name``; None if none listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(address_of(name))
    except ConnectionError:
        sock.close()
        return None
    return sock
