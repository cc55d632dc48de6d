"""Files with a digest of each block, so that a reader can verify what it reads: XXH3 of 128 bits,
twenty times as fast as a digest made against forgers, whom the files' modes keep out.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128

from parsl_freetrain.host.files import create

BLOCK = 64 * 2**20  # bytes of a block
DIGEST_BYTES = 16
_THREADS = 4


def threads() -> ThreadPoolExecutor:
    """Threads that hash and write, and release the interpreter lock; the others are training's."""
    return ThreadPoolExecutor(max(1, min(_THREADS, len(os.sched_getaffinity(0)) // 2)))


def digest(content: bytes | memoryview) -> str:
    return xxh3_128(content).hexdigest()


def blocks_of(file: BinaryIO) -> tuple[str, ...]:
    return tuple(digest(block) for block in iter(lambda: file.read(BLOCK), b'')) or (digest(b''),)


def digest_of_blocks(blocks: Sequence[str]) -> str:
    return digest(''.join(blocks).encode())


class FileImage:
    """A file's bytes in memory, which ``complete`` waits for; ``fd``: for other processes."""

    def __init__(
        self,
        content: memoryview,
        fd: int | None = None,
        complete: Callable[[], object] = lambda: None,
    ) -> None:
        self._content, self.fd, self._complete = content, fd, complete
        self._blocks: tuple[str, ...] = ()

    @property
    def content(self) -> memoryview:
        self._complete()
        return self._content

    @property
    def blocks(self) -> tuple[str, ...]:
        if not self._blocks:
            self._blocks = self._of_each(lambda part, _: digest(part))
        return self._blocks

    def write(self, path: Path) -> None:
        """Write a new, private (0600) file, durably; FileExistsError if there is one."""
        with create(path) as file:

            def write(part: memoryview, at: int) -> str:
                found = self._blocks[at // BLOCK] if self._blocks else digest(part)
                begin, length = at, len(part)
                while part:
                    wrote = os.pwrite(file.fileno(), part, at)
                    part, at = part[wrote:], at + wrote
                # Linux begins to write it out, which it would not do before fsync.
                with suppress(OSError):
                    os.posix_fadvise(file.fileno(), begin, length, os.POSIX_FADV_DONTNEED)
                return found

            self._blocks = self._of_each(write)
            os.fsync(file.fileno())

    def _of_each(self, do: Callable[[memoryview, int], str]) -> tuple[str, ...]:
        content = self.content
        with threads() as pool:
            starts = range(0, max(len(content), 1), BLOCK)
            return tuple(pool.map(lambda at: do(content[at : at + BLOCK], at), starts))


def write_hashed(path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, ...]:
    """Write a new, private, durable file; returns the digest of each block."""
    digests: list[str] = []
    hasher, left = xxh3_128(), BLOCK
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
                    hasher, left = xxh3_128(), BLOCK
        file.flush()
        os.fsync(file.fileno())
    return (*digests, hasher.hexdigest()) if left < BLOCK or not digests else tuple(digests)
