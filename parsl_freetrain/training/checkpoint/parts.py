"""What a state consists of. Each rank that writes has a part, a file of tensors; one table says
which part of which tensor is where. A whole state is one part of one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.host.files import write_new
from parsl_freetrain.training.checkpoint.block_digests import (
    FileImage,
    blocks_of,
    digest_of_blocks,
    write_hashed,
)
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.manifest import Damaged, damage, verify
from parsl_freetrain.training.checkpoint.safetensors_io import Layout, Piece, layout_of
from parsl_freetrain.training.checkpoint.transport import Disk

TABLE = 'tensors.json'
FORMAT = 2

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


class Table(msgspec.Struct, frozen=True):
    """What is where; of one rank's part, or of all. ``structure``: the file with everything that is
    not a tensor, as ``torch.save`` writes it; empty: another rank writes it.
    """

    format: int
    tensors: dict[str, Entry]
    structure: str = ''


class Part(msgspec.Struct, frozen=True):
    """One rank's part: its table, and the digests of its files."""

    table: Table
    blocks: Blocks


class Contents(msgspec.Struct, frozen=True):
    """All of a state but the bytes of its tensors.

    Attributes
    ----------
    tensors
        Where the parts of each tensor are.
    files
        The files of tensors: of each, its size in bytes and the digests of its blocks.
    structure
        Everything that is not a tensor, as ``torch.save`` writes it; empty: it is in that of
        another rank.
    """

    tensors: dict[str, Entry]
    files: dict[str, tuple[int, tuple[str, ...]]]
    structure: bytes

    @property
    def packed(self) -> bytes:
        """Itself, as bytes that :meth:`unpacked` takes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpacked(cls, content: bytes | memoryview) -> Contents:
        """From :attr:`packed`."""
        return msgspec.msgpack.decode(content, type=cls)

    @classmethod
    def of(
        cls,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        boxes: Mapping[str, Box],
        structure: Any,
        image: FileImage,
    ) -> Contents:
        """Of what one rank has in memory; the arguments are those of :func:`write_part`."""
        file = file_of(rank)
        files = {file: (len(image.content), image.blocks)}
        pickled = b'' if structure is None else _pickled(structure)
        return cls(_entries(file, tensors, boxes), files, pickled)

    @classmethod
    def read(cls, folder: Path) -> Contents:
        """Of a checkpoint. All that is read is verified.

        Raises
        ------
        BadInput
            If it is not a checkpoint of this format.
        Damaged
            If it is not what was committed, or a file is missing or has another length.
        """
        files = verify(folder, blocks=False).blocks
        try:
            table = _read_table(folder)
            structure = (folder / table.structure).read_bytes()
        except OSError as error:
            raise damage(error) from error
        if blocks_of(io.BytesIO(structure)) != files[table.structure][1]:
            raise Damaged(f'{table.structure} does not have the digest that was committed')
        of_tensors = {chunk.at[0] for entry in table.tensors.values() for chunk in entry.chunks}
        return cls(table.tensors, {name: files[name] for name in sorted(of_tensors)}, structure)

    @classmethod
    def united(cls, parts: Sequence[Contents]) -> Contents:
        """All parts together; raises FreeTrainError if they are not all."""
        structure = next((part.structure for part in parts if part.structure), b'')
        if not structure:
            raise FreeTrainError('No rank has left what is not a tensor.')
        files = {name: file for part in parts for name, file in part.files.items()}
        return cls(_merged(part.tensors for part in parts), dict(sorted(files.items())), structure)


def write_part(
    folder: Path,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box],
    structure: Any = None,
    image: FileImage | None = None,
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
        The file of tensors, laid out by :func:`placed`; None: it is put together while it is
        written.
    """
    blocks: Blocks = {}
    file, of_structure = file_of(rank), ''
    if tensors and image is not None:
        Disk(folder).put(file, image)
        blocks[file] = image.blocks
    elif tensors:
        blocks[file] = write_hashed(folder / file, placed(tensors, boxes)[0].content())
    if structure is not None:
        of_structure = f'rank-{rank}-0.pt'
        blocks[of_structure] = write_hashed(folder / of_structure, [_pickled(structure)])
    return Part(Table(FORMAT, _entries(file, tensors, boxes), of_structure), blocks)


def file_of(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f'rank-{rank}.safetensors'


def contents_of(rank: int) -> str:
    """The name, in memory, of what a rank's file of tensors consists of."""
    return f'rank-{rank}.contents'


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
    entries = _merged(part.table.tensors for part in parts)
    structure = next((part.table.structure for part in parts if part.table.structure), '')
    write_new(folder / TABLE, msgspec.json.encode(Table(FORMAT, entries, structure)))
    return {name: blocks for part in parts for name, blocks in part.blocks.items()}


def _read_table(folder: Path) -> Table:
    content = (folder / TABLE).read_bytes()
    found = msgspec.json.decode(content).get('format')
    if found != FORMAT:
        raise BadInput(
            f'Checkpoint {folder} has state format {found}, and this version '
            f'reads format {FORMAT}: use the version that wrote it.'
        )
    return msgspec.json.decode(content, type=Table)


def _merged(tables: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The parts of all tensors; those that several ranks have count once."""
    entries: dict[str, Entry] = {}
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for table in tables:
        for name, entry in table.items():
            entries.setdefault(name, entry)
            for chunk in entry.chunks:
                chunks.setdefault(name, {}).setdefault(chunk.offsets, chunk)
    for name, entry in entries.items():
        written = sum(math.prod(chunk.sizes) for chunk in chunks[name].values())
        if written != math.prod(entry.shape):
            raise FreeTrainError(
                f'The ranks have written {written} of {math.prod(entry.shape)} elements of '
                f'{name!r}, so the checkpoint is incomplete: each part of a tensor must have one '
                'rank that writes it.'
            )
    return {
        name: Entry(entry.dtype, entry.shape, tuple(chunks[name].values()))
        for name, entry in entries.items()
    }


def _entries(
    file: str, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]
) -> dict[str, Entry]:
    entries, (_, places) = {}, placed(tensors, boxes)
    for name, tensor in tensors.items():
        box = _box(name, tensor, boxes)
        chunk = Chunk(box.offsets, box.sizes, (file, *places[name]))
        entries[name] = Entry(str(tensor.dtype).removeprefix('torch.'), box.shape, (chunk,))
    return entries


def _pickled(structure: Any) -> bytes:
    content = io.BytesIO()
    torch.save(structure, content)
    return content.getvalue()


def _box(name: str, tensor: torch.Tensor, boxes: Mapping[str, Box]) -> Box:
    return boxes.get(name) or Box.whole(tuple(tensor.shape))


def _name_in_file(name: str, box: Box) -> str:
    return name if box.sizes == box.shape else f'{name}@{",".join(map(str, box.offsets))}'


def _table_of(rank: int) -> str:
    return f'rank-{rank}.json'
