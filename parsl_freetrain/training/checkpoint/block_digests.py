"""Digests of a file by blocks, made while it is written, so that a reader can verify the blocks
that it reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from parsl_freetrain.host.files import create

BLOCK = 64 * 2**20
"""Bytes of a block."""
DIGEST_BYTES = 32


def digest(content: bytes | memoryview) -> str:
    """The digest of bytes, in hexadecimal."""
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def blocks_of(file: BinaryIO) -> tuple[str, ...]:
    """The digest of each block of an open file."""
    found = tuple(digest(block) for block in iter(lambda: file.read(BLOCK), b''))
    return found or (digest(b''),)


def digest_of_blocks(blocks: Sequence[str]) -> str:
    """The digest of a file, from those of its blocks."""
    return digest(''.join(blocks).encode())


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, ...]:
    """Write a new, private (0600) file and make it durable.

    Returns
    -------
    tuple
        The digest of each block.

    Raises
    ------
    FileExistsError
        If there is one of this name.
    """
    digests: list[str] = []
    hasher, left = blake2b(digest_size=DIGEST_BYTES), BLOCK
    with create(path) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                # Hashing and large writes release the interpreter lock, so training continues.
                part, view = view[:left], view[left:]
                hasher.update(part)
                file.write(part)
                left -= len(part)
                if not left:
                    digests.append(hasher.hexdigest())
                    hasher, left = blake2b(digest_size=DIGEST_BYTES), BLOCK
        file.flush()
        os.fsync(file.fileno())
    return (*digests, hasher.hexdigest()) if left < BLOCK or not digests else tuple(digests)
