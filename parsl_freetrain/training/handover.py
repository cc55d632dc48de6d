"""A state that goes from one fragment of a trainer to the next in memory: kept on the node by its warm parent, not read from disk.

It is never the only one: the same state has been committed as a checkpoint. What arrives counts only if it has the digest that the next
fragment's order names, which came over the executor's own channel.
"""

from __future__ import annotations

import io
import json
import os
import socket
import struct
from hashlib import blake2b

import torch

from parsl_freetrain.training.berths import WARM_VARIABLE
from parsl_freetrain.training.channel import Channel, is_ours
from parsl_freetrain.training.fragment import Handover
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.state import Saved, State, assemble
from parsl_freetrain.training.tensorfile import bytes_of, read_into

_LENGTH = struct.Struct('<QQ')
_ANSWER_S = 10.0


def pack(state: State) -> tuple[int, str]:
    """Copy a state into a file that only lives in memory.

    Returns
    -------
    tuple
        Its file descriptor, and the digest of its bytes.

    Raises
    ------
    OSError
        If there is not enough memory.
    """
    tensors = {name: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for name, tensor in state.tensors.items()}
    header = json.dumps([[name, str(tensor.dtype).removeprefix('torch.'), list(tensor.shape)] for name, tensor in tensors.items()]).encode()
    structure = io.BytesIO()
    torch.save(state.structure, structure)
    digest = blake2b(digest_size=32)
    fd = os.memfd_create('freetrain-state', os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, 'wb', closefd=False) as file:
            lengths = _LENGTH.pack(len(header), structure.tell())
            pieces: list[bytes | memoryview] = [lengths, header, structure.getbuffer(), *map(bytes_of, tensors.values())]
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
    except BaseException:
        os.close(fd)
        raise
    return fd, digest.hexdigest()


def unpack(data: torch.Tensor) -> State:
    """The state that :func:`pack` packed, from its bytes; to be called with bytes of a known digest only."""
    view = bytes_of(data)
    of_header, of_structure = _LENGTH.unpack_from(view)
    at = _LENGTH.size
    header = json.loads(bytes(view[at:at + of_header]))
    at += of_header
    structure = torch.load(io.BytesIO(view[at:at + of_structure]), weights_only=True)
    at += of_structure
    tensors = {}
    for name, dtype, shape in header:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).copy_(data[at:at + tensor.nbytes])
        tensors[name] = tensor
        at += tensor.nbytes
    return State(tensors, structure)


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


def digest_of(data: torch.Tensor) -> str:
    """The digest of bytes, in hexadecimal digits."""
    return blake2b(bytes_of(data), digest_size=32).hexdigest()


def receive(handover: Handover, trainer: str, peers: Peers, device: torch.device) -> Saved | None:
    """The state that the fragment before has left on the node of rank 0, on all ranks; None on all of them if one did not get it whole.

    It travels as gradients do. Every rank compares its digest.
    """
    data: torch.Tensor | None = None

    def look() -> str:
        nonlocal data
        try:
            data = fetch(trainer, handover.digest)
        except (OSError, EOFError) as error:
            print(f'The state of the fragment before could not be had from memory: {error}')
        return '0' if data is None else str(data.numel())
    size = int(peers.tell('handover', look))
    if not size:
        return None
    if data is None:
        data = torch.empty(size, dtype=torch.uint8)
    peers.broadcast([data])
    wrong = digest_of(data) != handover.digest
    if peers.largest((int(wrong),), device)()[0]:
        print('The state of the fragment before was not the same on all ranks; the checkpoint is used.')
        return None
    return assemble(handover.path, unpack(data))


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

