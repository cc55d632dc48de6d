"""Files of tensors in the safetensors format: a header and raw bytes. Reading one runs no code."""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.training.checkpoint.block_digests import write_hashed

# The format's own names; https://github.com/huggingface/safetensors, "Format".
_SIZES = {'float': (16, 32, 64), 'int': (8, 16, 32, 64), 'uint': (8, 16, 32, 64)}  # in bits
_NAMES = {
    getattr(torch, f'{kind}{n}'): f'{kind[0].upper()}{n}' for kind in _SIZES for n in _SIZES[kind]
}
_NAMES |= {torch.complex64: 'C64', torch.bfloat16: 'BF16', torch.bool: 'BOOL'}
_NAMES |= {torch.float8_e4m3fn: 'F8_E4M3', torch.float8_e5m2: 'F8_E5M2'}
_LENGTH = struct.Struct('<Q')
_ALIGNMENT = 64  # a multiple of every element's size, so that tensors can be views of the file


@dataclass(frozen=True)
class Piece:
    name: str  #: its name in the file
    dtype: torch.dtype  #: dtype, shape: those of the tensor that ``get`` returns
    shape: tuple[int, ...]
    #: Returns the tensor, dense and on any device, just before it is written, one after the other.
    get: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    header: bytes  #: what stands before the tensors
    pieces: tuple[Piece, ...]  #: the tensors, in the order of the file
    #: By name, where in the file the tensor's bytes begin, and their number.
    places: dict[str, tuple[int, int]]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def content(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file; each tensor is got just before its own."""
        yield self.header
        for piece in self.pieces:
            yield bytes_of(piece.get().detach().cpu().resolve_conj().resolve_neg().contiguous())


def layout_of(pieces: Iterable[Piece]) -> FileLayout:
    # Largest elements first, since readers that map the file need each tensor to be aligned.
    ordered = tuple(sorted(pieces, key=lambda piece: -piece.dtype.itemsize))
    entries: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    end = 0
    for piece in ordered:
        known = piece.dtype in _NAMES
        # A type that the format does not know (complex128) is written as bytes.
        entries[piece.name] = {
            'dtype': _NAMES[piece.dtype] if known else 'U8',
            'shape': piece.shape if known else [piece.nbytes],
            'data_offsets': [end, end := end + piece.nbytes],
        }
    header = json.dumps(entries, separators=(',', ':')).encode()
    header += b' ' * (-(len(header) + _LENGTH.size) % _ALIGNMENT)
    places, at = {}, _LENGTH.size + len(header)
    for piece in ordered:
        places[piece.name] = at, piece.nbytes
        at += piece.nbytes
    return FileLayout(_LENGTH.pack(len(header)) + header, ordered, places)


def write_tensors(path: Path, pieces: Iterable[Piece]) -> tuple[str, ...]:
    """Write a new, private, durable file; returns the digest of each block."""
    return write_hashed(path, layout_of(pieces).content())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense tensor on the CPU; no copy is made."""
    if not tensor.numel():
        return memoryview(b'')
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
