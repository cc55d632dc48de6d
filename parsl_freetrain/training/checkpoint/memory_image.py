"""A state as one piece of memory: a file that is handed from process to process, or a tensor of
bytes that is sent from rank to rank.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch

from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.state import State

_LENGTH = struct.Struct('<QQ')
_BLOCK = 2**23


def pack(state: State) -> tuple[int, torch.Tensor]:
    """Copy a state into a file that only lives in memory.

    Returns
    -------
    tuple
        Its file descriptor, which the caller closes, and a tensor that maps its bytes.

    Raises
    ------
    OSError, RuntimeError, MemoryError
        If there is not enough memory for the file or for a copy from a device.
    """
    tensors = {
        name: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        for name, tensor in state.tensors.items()
    }
    header = json.dumps(
        [
            [name, str(tensor.dtype).removeprefix('torch.'), list(tensor.shape)]
            for name, tensor in tensors.items()
        ]
    ).encode()
    structure = io.BytesIO()
    torch.save(state.structure, structure)
    lengths = _LENGTH.pack(len(header), structure.tell())
    pieces: list[bytes | memoryview] = [
        lengths,
        header,
        structure.getbuffer(),
        *map(bytes_of, tensors.values()),
    ]
    fd = os.memfd_create('freetrain-state', os.MFD_CLOEXEC)
    try:
        with os.fdopen(fd, 'wb', closefd=False) as file:
            for piece in pieces:
                file.write(piece)
        return fd, bytes_in(fd)
    except BaseException:
        os.close(fd)
        raise


def unpack(data: torch.Tensor) -> State:
    """Restore the state from the bytes of :func:`pack`.

    Use it only on bytes from this trainer's own ranks, or with a known digest.
    """
    view = bytes_of(data)
    of_header, of_structure = _LENGTH.unpack_from(view)
    at = _LENGTH.size
    header = json.loads(bytes(view[at : at + of_header]))
    at += of_header
    structure = torch.load(io.BytesIO(view[at : at + of_structure]), weights_only=True)
    at += of_structure
    tensors = {}
    for name, dtype, shape in header:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device='cpu')
        tensor.reshape(-1).view(torch.uint8).copy_(data[at : at + tensor.nbytes])
        tensors[name] = tensor
        at += tensor.nbytes
    return State(tensors, structure)


def digest_of(data: torch.Tensor) -> str:
    """The digest of bytes, in hexadecimal. Blocks of them have digests, which all cores make."""
    view = bytes_of(data)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        blocks = threads.map(
            lambda at: blake2b(view[at : at + _BLOCK], digest_size=32).digest(),
            range(0, len(view), _BLOCK),
        )
        return blake2b(b''.join(blocks), digest_size=32).hexdigest()


def bytes_in(fd: int, size: int | None = None, *, private: bool = False) -> torch.Tensor:
    """A tensor that maps a file in memory, or its first ``size`` bytes; the file may be closed
    afterwards. ``private``: changes stay in this process. Raises ValueError if it is shorter.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    mapped = mmap.mmap(fd, size or os.fstat(fd).st_size, flags=flags)
    return torch.frombuffer(mapped, dtype=torch.uint8)
