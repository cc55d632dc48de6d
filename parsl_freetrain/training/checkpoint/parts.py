"""The files of a checkpoint's state. Each rank writes its own part, a file of tensors; one table
says which part of which tensor is where.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.host.files import write_new
from parsl_freetrain.training.checkpoint.block_digests import (
    blocks_of,
    digest_of_blocks,
    write_hashed,
)
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.safetensors_io import Layout, Piece, bytes_of, layout_of

TABLE = 'tensors.json'
FORMAT = 1
STRUCTURE = 'structure'
_TENSORS = '.safetensors'

Place = tuple[str, int, int]
"""A file, where in it the bytes begin, and their number."""
Blocks = dict[str, tuple[str, ...]]
"""By name of a file, the digest of each of its blocks."""


class Chunk(msgspec.Struct, frozen=True):
    """A part of a tensor, and where its bytes are, in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: Place


class Entry(msgspec.Struct, frozen=True):
    """A tensor: its type, its shape as a whole, and its parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Stored(msgspec.Struct, frozen=True):
    """Anything else, as ``torch.save`` writes it."""

    at: Place


class Table(msgspec.Struct, frozen=True):
    """What is where; of one rank's part, or of all."""

    format: int
    tensors: dict[str, Entry]
    objects: dict[str, Stored]


class Part(msgspec.Struct, frozen=True):
    """One rank's part: its table, and the digests of its files."""

    table: Table
    blocks: Blocks


def write_part(
    folder: Path,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box],
    structure: Any = None,
    image: torch.Tensor | None = None,
) -> Part:
    """Write a rank's part, durably.

    Parameters
    ----------
    tensors
        What this rank holds of each tensor that it writes.
    boxes
        Which part that is; those that are not named are whole.
    structure
        Everything that is not a tensor; None: another rank writes it.
    image
        The bytes of the file of tensors, laid out by :func:`placed`; None: they are put together
        while they are written.
    """
    blocks: Blocks = {}
    entries: dict[str, Entry] = {}
    objects: dict[str, Stored] = {}
    if tensors:
        file = file_of(rank)
        layout, places = placed(tensors, boxes)
        content = layout.content() if image is None else [bytes_of(image)]
        blocks[file] = write_hashed(folder / file, content)
        for name, tensor in tensors.items():
            box = _box(name, tensor, boxes)
            chunk = Chunk(box.offsets, box.sizes, (file, *places[name]))
            entries[name] = Entry(str(tensor.dtype).removeprefix('torch.'), box.shape, (chunk,))
    if structure is not None:
        file, content = f'rank-{rank}-0.pt', io.BytesIO()
        torch.save(structure, content)
        blocks[file] = write_hashed(folder / file, [content.getbuffer()])
        objects[STRUCTURE] = Stored((file, 0, content.tell()))
    return Part(Table(FORMAT, entries, objects), blocks)


def file_of(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f'rank-{rank}{_TENSORS}'


def holds_tensors(file: str) -> bool:
    """Whether a file of a checkpoint is a rank's file of tensors."""
    return file.endswith(_TENSORS)


def placed(
    tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]
) -> tuple[Layout, dict[str, tuple[int, int]]]:
    """The file of tensors that :func:`write_part` writes, and where in it the bytes of each tensor
    begin, with their number.
    """
    names = {
        name: _name_in_file(name, _box(name, tensor, boxes)) for name, tensor in tensors.items()
    }
    layout = layout_of(
        Piece(names[name], tensor.dtype, tuple(tensor.shape), partial(tensors.__getitem__, name))
        for name, tensor in tensors.items()
    )
    return layout, {name: layout.places[names[name]] for name in tensors}


def write_table_of_part(folder: Path, rank: int, part: Part) -> str:
    """Write what :func:`read_table_of_part` reads, durably; returns its digest."""
    return digest_of_blocks(write_hashed(folder / _table_of(rank), [msgspec.json.encode(part)]))


def read_table_of_part(folder: Path, rank: int, expected: str) -> Part:
    """The table of another rank's part, which has the digest ``expected``. Raises FreeTrainError if
    the file system shows another content, or none.
    """
    name = _table_of(rank)
    try:
        content = (folder / name).read_bytes()
    except FileNotFoundError:
        content = b''
    blocks = blocks_of(io.BytesIO(content))
    if digest_of_blocks(blocks) != expected:
        raise FreeTrainError(
            f'{folder / name} is not what rank {rank} wrote: the file system must show a file to '
            'other nodes once it is closed.'
        )
    part = msgspec.json.decode(content, type=Part)
    return Part(part.table, {**part.blocks, name: blocks})


def write_table(folder: Path, parts: Sequence[Part]) -> Blocks:
    """Write the table of all parts. Returns the digests of all files of the parts. Raises
    FreeTrainError if the parts of a tensor do not make up the whole.
    """
    entries: dict[str, Entry] = {}
    for part in parts:
        for name, entry in part.table.tensors.items():
            known = entries.get(name)
            chunks = (*known.chunks, *entry.chunks) if known is not None else entry.chunks
            entries[name] = Entry(entry.dtype, entry.shape, chunks)
    for name, entry in entries.items():
        written = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if written != math.prod(entry.shape):
            raise FreeTrainError(
                f'The ranks have written {written} of {math.prod(entry.shape)} elements of '
                f'{name!r}, so the checkpoint is incomplete: each part of a tensor must have one '
                'rank that writes it.'
            )
    objects = {name: stored for part in parts for name, stored in part.table.objects.items()}
    write_new(folder / TABLE, msgspec.json.encode(Table(FORMAT, entries, objects)))
    return {name: blocks for part in parts for name, blocks in part.blocks.items()}


def read_table(folder: Path) -> Table:
    """The table of a checkpoint. Raises BadInput if its format is not the one that this version
    reads; FileNotFoundError if there is none.
    """
    content = (folder / TABLE).read_bytes()
    found = msgspec.json.decode(content).get('format')
    if found != FORMAT:
        raise BadInput(
            f'Checkpoint {folder} has state format {found}, and this version '
            f'reads format {FORMAT}: use the version that wrote it.'
        )
    return msgspec.json.decode(content, type=Table)


def _box(name: str, tensor: torch.Tensor, boxes: Mapping[str, Box]) -> Box:
    return boxes.get(name) or Box.whole(tuple(tensor.shape))


def _name_in_file(name: str, box: Box) -> str:
    return name if box.sizes == box.shape else f'{name}@{",".join(map(str, box.offsets))}'


def _table_of(rank: int) -> str:
    return f'rank-{rank}.json'
