"""Where files of a state are kept: on disk, or in the memory of this or another node."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from parsl_freetrain.host.files import open_regular
from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint.block_digests import FileImage, digest
from parsl_freetrain.training.checkpoint.manifest import damage, damaged, path_in
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of

FileBlock = tuple[str, int]  # a file, and the number of a block in it
Files = Mapping[str, tuple[int, tuple[str, ...]]]
"""By name, the size of a file in bytes, and the digests of its blocks."""
_RECENT = 2


class Transport(Protocol):
    """One of the ways from a fragment to the next."""

    def put(self, file: str, image: FileImage) -> bool:
        """Keep a file. False: it is not kept, and an earlier state is what counts."""

    def has(self, file: str) -> bool:
        """Whether it has all of a file."""

    def fetch(self, blocks: Sequence[FileBlock]) -> Iterator[memoryview]:
        """Blocks in order, verified; Damaged, or OSError if the file system does not answer."""


class Disk:
    """The directory of a checkpoint. ``bytes_read``: number of bytes read so far."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self._folder, self._files = folder, files or {}
        self._recent: dict[FileBlock, memoryview] = {}
        self.bytes_read = 0

    def put(self, file: str, image: FileImage) -> bool:
        image.write(self._folder / file)
        return True

    def has(self, file: str) -> bool:
        return path_in(self._folder, file).exists()

    def fetch(self, blocks: Sequence[FileBlock]) -> Iterator[memoryview]:
        return map(self.get, blocks)

    def get(self, block: FileBlock) -> memoryview:
        """The bytes of a block. The last ones are remembered."""
        if block not in self._recent:
            content = bytes_of(torch.empty(size_of(block, self._files), dtype=torch.uint8))
            self._read(block, content)
            if not is_right(block, content, self._files):
                what = 'does not have the digest that was committed'
                raise damaged(block[0], what, f'block {block[1]} of ')
            self._recent = dict([*self._recent.items(), (block, content)][-_RECENT:])
        return self._recent[block]

    def _read(self, block: FileBlock, target: memoryview) -> None:
        name, number = block
        try:
            with open_regular(path_in(self._folder, name)) as file:
                at = number * hashing.BLOCK
                while target:
                    got = os.preadv(file.fileno(), [target], at)
                    if not got:
                        raise damaged(name, 'is shorter than it was when it was committed')
                    self.bytes_read += got
                    target, at = target[got:], at + got
        except OSError as error:
            raise damage(error, path_in(self._folder, name)) from error


def size_of(block: FileBlock, files: Files) -> int:
    return min(hashing.BLOCK, files[block[0]][0] - block[1] * hashing.BLOCK)


def is_right(block: FileBlock, content: memoryview, files: Files) -> bool:
    return digest(content) == files[block[0]][1][block[1]]
