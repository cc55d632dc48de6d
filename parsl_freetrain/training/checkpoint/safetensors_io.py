"""Files of tensors in the safetensors format: a header and raw bytes. Reading one runs no code."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from parsl_freetrain.training.checkpoint.blocks import write_hashed

# The format's own names; https://github.com/huggingface/safetensors, "Format".
_NAMES = {
    torch.float64: 'F64',
    torch.float32: 'F32',
    torch.float16: 'F16',
    torch.bfloat16: 'BF16',
    torch.float8_e4m3fn: 'F8_E4M3',
    torch.float8_e5m2: 'F8_E5M2',
    torch.int64: 'I64',
    torch.int32: 'I32',
    torch.int16: 'I16',
    torch.int8: 'I8',
    torch.uint8: 'U8',
    torch.uint16: 'U16',
    torch.uint32: 'U32',
    torch.uint64: 'U64',
    torch.bool: 'BOOL',
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Piece:
    """A tensor to write.

    Attributes
    ----------
    name
        Its name in the file.
    dtype, shape
        Those of the tensor that ``get`` returns.
    get
        Returns the tensor, dense and on any device. It is called just before the tensor is written,
        so that only few copies exist at a time.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, pieces: Iterable[Piece]
) -> tuple[dict[str, tuple[int, int]], tuple[str, ...]]:
    """Write a new, private (0600) file and make it durable.

    Returns
    -------
    tuple
        By name, where in the file the tensor's bytes begin, and their number; and the digest of
        each block of the file.

    Raises
    ------
    FileExistsError
        If there is one of this name.
    """
    # Largest elements first, since readers that map the file need each tensor to be aligned.
    ordered = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
    entries: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    end = 0
    for piece in ordered:
        known = piece.dtype in _NAMES
        # A type that the format does not know (complex numbers) is written as bytes.
        entries[piece.name] = {
            'dtype': _NAMES[piece.dtype] if known else 'U8',
            'shape': piece.shape if known else [piece.nbytes],
            'data_offsets': [end, end := end + piece.nbytes],
        }
    header = json.dumps(entries, separators=(',', ':')).encode()
    header += b' ' * (-len(header) % _ALIGNMENT)
    places, at = {}, _ALIGNMENT + len(header)
    for piece in ordered:
        places[piece.name] = at, piece.nbytes
        at += piece.nbytes

    def content() -> Iterator[bytes | memoryview]:
        yield struct.pack('<Q', len(header)) + header
        for piece in ordered:
            yield bytes_of(piece.get().detach().cpu().resolve_conj().resolve_neg().contiguous())

    return places, write_hashed(path, content())


def read_into(file: BinaryIO, start: int, target: torch.Tensor) -> None:
    """Read a tensor's bytes, which begin at ``start``, into a dense tensor on the CPU.

    Raises
    ------
    EOFError
        If the file ends too early.
    """
    file.seek(start)
    view = bytes_of(target)
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise EOFError(f'{file.name} ends before byte {start + target.nbytes}.')
        view = view[got:]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU; no copy is made."""
    if not tensor.numel():
        return memoryview(b'')
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
