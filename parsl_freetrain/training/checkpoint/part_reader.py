"""Reading tensors, or parts of them, from a checkpoint that any number of ranks wrote."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint import manifest
from parsl_freetrain.training.checkpoint.block_digests import digest
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.manifest import Damaged, damage
from parsl_freetrain.training.checkpoint.parts import STRUCTURE, Chunk, read_table
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of

Block = tuple[str, int]
"""A file of a checkpoint, and the number of a block in it."""


class BlockSource(Protocol):
    """Where blocks of a checkpoint's files may be had without reading them."""

    def plan(self, needed: Set[Block]) -> None:
        """Call once, with the blocks that will be asked for in order of file and number."""
        ...

    def block(self, block: Block) -> memoryview | None:
        """A block's bytes, which are to be verified; None: it has to be read."""
        ...


@dataclass(frozen=True)
class _Span:
    """Rows of a chunk, and the part of a wanted tensor that is in them."""

    file: str
    start: int
    rows: Box
    wanted: Box
    target: torch.Tensor

    @property
    def blocks(self) -> Iterator[Block]:
        """Those that the rows are in."""
        size = self.rows.numel * self.target.element_size()
        if size:
            last = (self.start + size - 1) // hashing.BLOCK
            yield from ((self.file, n) for n in range(self.start // hashing.BLOCK, last + 1))


class PartReader:
    """Reads the tensors of one checkpoint.

    Parameters
    ----------
    folder
        The checkpoint's directory.
    verify
        Whether to compare the digest of each block that is read with what was committed; False if
        that has been done.

    Attributes
    ----------
    files
        If verified: of each file, its size in bytes and the digests of its blocks.
    bytes_read
        Number of bytes read so far.

    Raises
    ------
    BadInput
        If the format is another one.
    Damaged
        If the table is not what was committed, or a file is missing or has another length.
    """

    def __init__(self, folder: Path, *, verify: bool) -> None:
        self._folder = folder
        self.files: dict[str, tuple[int, tuple[str, ...]]] = {}
        if verify:
            self.files = manifest.verify(folder, blocks=False).blocks
        self._held: tuple[str, int, memoryview] = ('', 0, memoryview(b''))
        self._source: BlockSource | None = None
        self.bytes_read = 0
        try:
            self._table = read_table(folder)
        except OSError as error:
            raise damage(error) from error

    def shapes(self, prefix: str = '') -> dict[str, tuple[int, ...]]:
        """The shapes of the whole tensors whose names begin with ``prefix``."""
        return {
            name: entry.shape
            for name, entry in self._table.tensors.items()
            if name.startswith(prefix)
        }

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        dtype = self._table.tensors[name].dtype
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise BadInput(
                f'A checkpoint holds tensors of type {dtype!r}, which this version of torch '
                'does not know: use a newer one.'
            )
        return found

    def structure(self) -> Any:
        """What was saved beside the tensors. No code of the file is run."""
        file, start, size = self._table.objects[STRUCTURE].at
        content = torch.empty(size, dtype=torch.uint8)
        self._read(file, start, bytes_of(content))
        return torch.load(io.BytesIO(bytes_of(content)), map_location='cpu', weights_only=True)

    def read(
        self, wanted: Mapping[str, Box], source: BlockSource | None = None
    ) -> dict[str, torch.Tensor]:
        """The wanted parts, by name, on the CPU. Only the rows that they are in are read. Blocks
        that ``source`` has are verified and not read. Raises Damaged if what is read is not what
        was committed; OSError if the file system does not answer.
        """
        found = {
            name: torch.empty(box.sizes, dtype=self.dtype(name)) for name, box in wanted.items()
        }
        spans = [
            span
            for name, box in wanted.items()
            for chunk in self._table.tensors[name].chunks
            if (span := _span(chunk, box, found[name])) is not None
        ]
        if source is not None:
            source.plan({block for span in spans for block in span.blocks})
        self._source = source
        for span in sorted(spans, key=lambda span: (span.file, span.start)):
            self._fill(span)
        self._source = None
        return found

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self.read({name: Box.whole(self._table.tensors[name].shape)})[name]

    def _fill(self, span: _Span) -> None:
        part = span.wanted.overlap(span.rows)
        assert part is not None
        target = span.wanted.inside(span.target, part)
        if part == span.rows and target.is_contiguous():
            self._read(span.file, span.start, bytes_of(target))
            return
        rows = torch.empty(span.rows.sizes, dtype=span.target.dtype)
        self._read(span.file, span.start, bytes_of(rows))
        target.copy_(span.rows.inside(rows, part))

    def _read(self, name: str, start: int, target: memoryview) -> None:
        size, blocks = self.files.get(name, (0, ()))
        try:
            with (self._folder / name).open('rb', buffering=0) as file:
                if not blocks:
                    file.seek(start)
                    self._take(file, name, target)
                while blocks and target:
                    number, begin = divmod(start, hashing.BLOCK)
                    if self._held[:2] != (name, number):
                        block = self._from_memory((name, number), blocks[number])
                        if block is None:
                            held_from = number * hashing.BLOCK
                            block = memoryview(bytearray(min(hashing.BLOCK, size - held_from)))
                            file.seek(held_from)
                            self._take(file, name, block)
                            if digest(block) != blocks[number]:
                                raise Damaged(
                                    f'block {number} of {name} does not have the digest that was '
                                    'committed'
                                )
                        self._held = name, number, block
                    got = self._held[2][begin : begin + len(target)]
                    target[: len(got)] = got
                    target, start = target[len(got) :], start + len(got)
        except OSError as error:
            raise damage(error) from error

    def _from_memory(self, block: Block, expected: str) -> memoryview | None:
        found = self._source.block(block) if self._source is not None else None
        if found is not None and digest(found) != expected:
            print(f'Block {block[1]} of {block[0]} in memory is not the one that was committed.')
            return None
        return found

    def _take(self, file: Any, name: str, target: memoryview) -> None:
        self.bytes_read += len(target)
        while target:
            got = file.readinto(target)
            if not got:
                raise Damaged(f'{name} is shorter than it was when it was committed')
            target = target[got:]


def _span(chunk: Chunk, wanted: Box, target: torch.Tensor) -> _Span | None:
    """The rows of a chunk that a wanted part needs; None: it needs none."""
    held = Box(wanted.shape, chunk.offsets, chunk.sizes)
    part = held.overlap(wanted)
    file, start, _ = chunk.at
    if part is None:
        return None
    if not held.sizes:
        return _Span(file, start, held, wanted, target)
    row = math.prod(held.sizes[1:]) * target.element_size()
    rows = Box(wanted.shape, (part.offsets[0], *held.offsets[1:]), (part.sizes[0], *held.sizes[1:]))
    return _Span(file, start + (part.offsets[0] - held.offsets[0]) * row, rows, wanted, target)
