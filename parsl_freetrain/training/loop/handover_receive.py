"""Receiving a state in memory from the previous fragment of a trainer. The node's fork server keeps
it.

It is only a shortcut: the same state has been committed as a checkpoint, or the fragment was broken
off and an older checkpoint would do. The state is used only if it has the digest in the next
fragment's order, which came over the executor's own channel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from parsl_freetrain.training.checkpoint.memory_image import bytes_in, digest_of, unpack
from parsl_freetrain.training.checkpoint.state import Saved, State, assemble
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.process.channel import Channel, is_ours
from parsl_freetrain.training.process.standby_slots import FORK_SERVER_VARIABLE
from parsl_freetrain.training.spec.codec import Decoder
from parsl_freetrain.training.spec.fork_messages import (
    FetchState,
    ForkAnswer,
    KeepState,
    OfferState,
    StateKept,
    StateWanted,
)
from parsl_freetrain.training.spec.fragment_order import Handover

_ANSWER_S = 10.0


def keep(
    trainer: str, fd: int, digest: str, offer: OfferState | None = None, file: str = ''
) -> bool:
    """Leave a packed state, or a file of a checkpoint, with this node's fork server for the
    trainer's next fragment. Returns whether the fork server has accepted it.
    """
    with closing(_fork_server()) as channel:
        if not channel.send(KeepState(trainer, digest, offer, file)):
            return False
        channel.send_fd(fd)
        return channel.poll(_ANSWER_S) and isinstance(channel.recv(), StateKept)


def is_wanted(offer: OfferState) -> bool:
    """Whether this node's fork server wants a state; no other rank here has offered as much."""
    with closing(_fork_server()) as channel:
        try:
            return (
                channel.send(offer)
                and channel.poll(_ANSWER_S)
                and isinstance(channel.recv(), StateWanted)
            )
        except EOFError:
            return False


def fetch(trainer: str, digest: str, *, again: bool = False) -> torch.Tensor | None:
    """Take the bytes with this digest from this node's fork server; None if it has none. The caller
    must verify the digest. ``again``: they can be fetched again.
    """
    fd = fetch_fd(FetchState(trainer, digest, again))
    if fd is None:
        return None
    try:
        return bytes_in(fd, private=True)
    finally:
        os.close(fd)


def fetch_fd(request: FetchState) -> int | None:
    """What this node's fork server has kept, as a file descriptor; None if it has it not."""
    with closing(_fork_server()) as channel:
        if not channel.send(request) or not channel.poll(_ANSWER_S):
            return None
        return channel.recv_fd()[1]


def receive(handover: Handover, trainer: str, peers: Peers) -> Saved | None:
    """Bring the state that the previous fragment left on rank 0's node to all ranks. Returns None
    on all ranks if one of them did not get it completely.

    The state is broadcast by the ranks' process group. Every rank compares the digest. All ranks
    allocate memory before the first byte is sent; otherwise rank 0 might send to ranks that do not
    receive.
    """
    data: torch.Tensor | None = None
    state: State | None = None

    def look() -> str:
        nonlocal data
        with _errors_printed():
            data = fetch(trainer, handover.digest, again=not handover.path)
        return '0' if data is None else str(data.numel())

    def all_have(what: object) -> bool:
        return not peers.all_reduce_max((what is None,))()[0]

    size = int(peers.broadcast_object('handover', look))
    if not size:
        return None
    if data is None:
        with _errors_printed():
            data = torch.empty(size, dtype=torch.uint8)
    if all_have(data) and data is not None:
        peers.broadcast([data])
        with _errors_printed():
            state = unpack(data) if digest_of(data) == handover.digest else None
        if all_have(state) and state is not None:
            return assemble(handover.path or 'in memory', state)
    print(
        'Not all ranks have got the state of the fragment before from memory; the '
        'checkpoint is used.'
    )
    return None


@contextmanager
def _errors_printed() -> Iterator[None]:
    """Print an error and continue, since the state in memory is not indispensable."""
    try:
        yield
    except (
        OSError,
        EOFError,
        ValueError,  # an empty file
        RuntimeError,
        MemoryError,
    ) as error:  # torch reports a lack of memory by RuntimeErrors
        print(f'The state of the fragment before could not be had from memory: {error}')


def _fork_server() -> Channel[ForkAnswer]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(b'\0' + os.environ.get(FORK_SERVER_VARIABLE, '').encode())
        if not is_ours(sock):
            raise PermissionError('another user listens where the fork server should')
    except OSError:
        sock.close()
        raise
    return Channel(sock, Decoder(ForkAnswer, 'the fork server'))
