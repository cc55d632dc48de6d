"""What a state consists of: parts, a file of tensors of each rank that writes; at least one."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.host.files import read_regular
from parsl_freetrain.training.checkpoint import block_digests
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.manifest import Damaged, damage, verify
from parsl_freetrain.training.checkpoint.safetensors_io import FileLayout, Piece, layout_of
from parsl_freetrain.training.checkpoint.transport import Disk

CONTENTS = 'contents.json'
_MOST = 2**34  # bytes of it

ByteRange = tuple[str, int, int]  # a file, where in it the bytes begin, and their number
Blocks = dict[str, tuple[str, ...]]  # by name of a file, the digest of each of its blocks


class Chunk(msgspec.Struct, frozen=True):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: ByteRange
    marks: tuple[int, ...] = ()  #: its fingerprint, if later checkpoints may refer to it


class Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Contents(msgspec.Struct, frozen=True):
    """All of a state, or of one rank's part, but the bytes of its tensors."""

    tensors: dict[str, Entry]  #: where the parts of each tensor are
    #: The files of tensors: of each, its size in bytes and the digests of its blocks.
    files: dict[str, tuple[int, tuple[str, ...]]]
    #: Everything that is not a tensor, as ``torch.save`` writes it; empty: in another part.
    structure: bytes

    @property
    def packed(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def unpacked(cls, content: bytes | memoryview) -> 'Contents':
        return msgspec.json.decode(content, type=cls)

    @classmethod
    def read(cls, folder: Path) -> 'Contents':
        """Of a checkpoint, verified; Damaged if altered, BadInput for another format."""
        committed = {
            file.name: file.blocks for file in verify(folder, content=False, shared=False).files
        }
        try:
            content = read_regular(folder / CONTENTS, _MOST)
        except OSError as error:
            raise damage(error, folder / CONTENTS) from error
        if block_digests.blocks_of(io.BytesIO(content)) != committed.get(CONTENTS):
            raise Damaged(f'{CONTENTS} does not have the digest that was committed')
        return cls.unpacked(content)

    @classmethod
    def united(cls, parts: 'Sequence[Contents]') -> 'Contents':
        structure = next((part.structure for part in parts if part.structure), b'')
        if not structure:
            raise FreeTrainError('No rank has written what is not a tensor.')
        files = {name: file for part in parts for name, file in part.files.items()}
        return cls(_merged(part.tensors for part in parts), dict(sorted(files.items())), structure)


def part_of(
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    boxes: Mapping[str, Box],
    structure: Any = None,
    image: block_digests.FileImage | None = None,
    folder: Path | None = None,
) -> Contents:
    """A rank's part: what it holds of each tensor that it writes, and which ``boxes`` those are if
    not the whole. ``structure``: what is no tensor (None: another rank writes it); ``image``: the
    file of tensors, by :func:`placed`; ``folder``: where it is written (None: only in memory).
    """
    name, files, entries = file_of(rank), {}, {}
    layout, places = placed(tensors, boxes)
    if tensors and image is not None:
        if folder is not None:
            Disk(folder).put(name, image)
        files[name] = layout.nbytes, image.blocks
    elif tensors and folder is not None:
        files[name] = layout.nbytes, block_digests.write_hashed(folder / name, layout.content())
    for of, tensor in tensors.items():
        entries[of] = entry_of(tensor, box_in(of, tensor, boxes), (name, *places[of]))
    pickled = io.BytesIO()
    if structure is not None:
        torch.save(structure, pickled)
    return Contents(entries, files, pickled.getvalue())


def entries_of(layout: FileLayout, file: str) -> dict[str, Entry]:
    """Of whole tensors in a file of them."""
    return {
        piece.name: entry_of(piece, Box.whole(piece.shape), (file, *layout.places[piece.name]))
        for piece in layout.pieces
    }


def entry_of(
    one: torch.Tensor | Piece, box: Box, at: ByteRange, marks: tuple[int, ...] = ()
) -> Entry:
    """Of a tensor of which there is one part."""
    return Entry(dtype_name(one.dtype), box.shape, (Chunk(box.offsets, box.sizes, at, marks),))


def file_of(rank: int) -> str:
    return f'rank-{rank}.safetensors'


def contents_of(rank: int) -> str:
    return f'rank-{rank}.json'


def placed(
    tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]
) -> tuple[FileLayout, dict[str, tuple[int, int]]]:
    """The file of tensors of :func:`part_of`, and where in it each one's bytes are."""
    names = {}
    for name, tensor in tensors.items():
        box = box_in(name, tensor, boxes)
        at = '' if box.sizes == box.shape else f'@{",".join(map(str, box.offsets))}'
        names[name] = name + at
    layout = layout_of(
        Piece(names[name], tensor.dtype, tuple(tensor.shape), partial(tensors.__getitem__, name))
        for name, tensor in tensors.items()
    )
    return layout, {name: layout.places[names[name]] for name in tensors}


def write_part(folder: Path, rank: int, part: Contents) -> str:
    """Write what :func:`read_part` reads, durably; returns its digest."""
    blocks = block_digests.write_hashed(folder / contents_of(rank), [part.packed])
    return block_digests.digest_of_blocks(blocks)


def read_part(folder: Path, rank: int, expected: str) -> Contents:
    """Another rank's part, of digest ``expected``; FreeTrainError if the file system has it not."""
    path = folder / contents_of(rank)
    content = read_regular(path, _MOST) if path.exists() else b''
    if block_digests.digest_of_blocks(block_digests.blocks_of(io.BytesIO(content))) != expected:
        raise FreeTrainError(
            f'{path} is not what rank {rank} wrote: the file system must show a file to other '
            'nodes once it is closed.'
        )
    return Contents.unpacked(content)


def write_contents(folder: Path, parts: Sequence[Contents]) -> Blocks:
    """Write what parts consist of, and return digests; FreeTrainError if one lacks."""
    whole = Contents.united(parts)
    written = block_digests.write_hashed(folder / CONTENTS, [whole.packed])
    return {CONTENTS: written, **{name: blocks for name, (_, blocks) in whole.files.items()}}


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
    parts = {name: tuple(one.values()) for name, one in chunks.items()}
    return {name: Entry(one.dtype, one.shape, parts[name]) for name, one in entries.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def box_in(name: str, tensor: torch.Tensor, boxes: Mapping[str, Box]) -> Box:
    return boxes.get(name) or Box.whole(tuple(tensor.shape))
