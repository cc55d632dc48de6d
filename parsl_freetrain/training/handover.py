"""A state that goes from one fragment of a trainer to the next in memory: kept on the node by its warm parent, not read from disk.

It is never the only one: the same state has been committed as a checkpoint. What arrives counts only if it has the digest that the next
fragment's order names, which came over the executor's own channel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from parsl_freetrain.training.berths import WARM_VARIABLE
from parsl_freetrain.training.channel import Channel, is_ours
from parsl_freetrain.training.fragment import Handover
from parsl_freetrain.training.packing import digest_of, unpack
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.state import Saved, State, assemble
from parsl_freetrain.training.tensorfile import read_into

_ANSWER_S = 10.0


def keep(trainer: str, fd: int, digest: str) -> bool:
    """Leave a packed state with this node's warm parent, for the next fragment of a trainer; whether it has been taken."""
    channel, sock = _to_warm_parent()
    with sock:
        if not channel.send({'kind': 'keep', 'trainer': trainer, 'digest': digest}):
            return False
        socket.send_fds(sock, [b'.'], [fd])
        return channel.poll(_ANSWER_S) and channel.recv().get('kind') == 'kept'


def fetch(trainer: str, digest: str) -> torch.Tensor | None:
    """The bytes that were left here under this digest, which the caller has to verify; None: there are none. They are let go of."""
    channel, sock = _to_warm_parent()
    with sock:
        if not channel.send({'kind': 'fetch', 'trainer': trainer, 'digest': digest}) or not channel.poll(_ANSWER_S):
            return None
        found, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not found or not fds:
        return None
    try:
        data = torch.empty(os.fstat(fds[0]).st_size, dtype=torch.uint8)
        with os.fdopen(fds[0], 'rb', buffering=0, closefd=False) as file:
            read_into(file, 0, data)
    finally:
        os.close(fds[0])
    return data


def receive(handover: Handover, trainer: str, peers: Peers) -> Saved | None:
    """The state that the fragment before has left on the node of rank 0, on all ranks; None on all of them if one did not get it whole.

    It travels as gradients do. Every rank compares its digest. All have room for it before the first byte is sent, which rank 0 would
    otherwise send to nobody.
    """
    data: torch.Tensor | None = None
    state: State | None = None

    def look() -> str:
        nonlocal data
        with _telling():
            data = fetch(trainer, handover.digest)
        return '0' if data is None else str(data.numel())

    def all_have(what: object) -> bool:
        return not peers.largest((what is None,))()[0]
    size = int(peers.tell('handover', look))
    if not size:
        return None
    if data is None:
        with _telling():
            data = torch.empty(size, dtype=torch.uint8)
    if all_have(data) and data is not None:
        peers.broadcast([data])
        with _telling():
            state = unpack(data) if digest_of(data) == handover.digest else None
        if all_have(state) and state is not None:
            return assemble(handover.path, state)
    print('Not all ranks have got the state of the fragment before from memory; the checkpoint is used.')
    return None


@contextmanager
def _telling() -> Iterator[None]:
    """Say what keeps a state from being had from memory, and go on: it is not needed."""
    try:
        yield
    except (OSError, EOFError, RuntimeError, MemoryError) as error:   # torch tells of too little memory by RuntimeErrors
        print(f'The state of the fragment before could not be had from memory: {error}')


def _to_warm_parent() -> tuple[Channel, socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(b'\0' + os.environ.get(WARM_VARIABLE, '').encode())
        if not is_ours(sock):
            raise PermissionError('another user listens where the warm parent should')
    except OSError:
        sock.close()
        raise
    return Channel(sock), sock

