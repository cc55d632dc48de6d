"""A file system in trouble, and another clock, for processes with :attr:`Shim.environment`."""

import contextlib
import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix('.c')
OPEN, READ, WRITE, SYNC, NAMES = 1, 2, 4, 8, 16
ALL = OPEN | READ | WRITE | SYNC | NAMES
_RULE = struct.Struct('<IiII240s')
_CLOCK, _CLOCK_AT = struct.Struct('<i60s'), 1024


def compiler() -> str | None:
    return shutil.which('gcc') or shutil.which('cc')


class Shim:
    """A library, built in ``folder``, and its rule. ``environment``: what programs need."""

    def __init__(self, folder: Path) -> None:
        library, rule = folder / 'shim.so', folder / 'rule'
        command = [compiler() or 'gcc', '-shared', '-fPIC', '-O2', '-o', str(library), str(SOURCE)]
        subprocess.run([*command, '-ldl'], check=True)
        rule.write_bytes(bytes(4096))
        self._file = rule.open('r+b')
        self._page = mmap.mmap(self._file.fileno(), 4096)
        self.environment = {'LD_PRELOAD': str(library), 'FREETRAIN_SHIM': str(rule)}

    @contextlib.contextmanager
    def trouble(
        self, calls: int, error: int, path: str, probability: float = 1.0
    ) -> Iterator[None]:
        """Calls on files of ``path`` fail with ``error``; 0: they move half the bytes."""
        share = int(1e6 * probability)
        self._page[: _RULE.size] = _RULE.pack(0, error, share, 0, path.encode())
        self._page[:4] = struct.pack('<I', calls)
        try:
            yield
        finally:
            self._page[:4] = bytes(4)

    def set_clock(self, node: str, ahead_s: int, place: int = 0) -> None:
        """A node's clock differs by whole seconds from now on; there is ``place`` for four."""
        at = _CLOCK_AT + place * _CLOCK.size
        self._page[at : at + _CLOCK.size] = _CLOCK.pack(ahead_s, node.encode())

    @property
    def struck(self) -> int:
        """How often the last rule has struck."""
        return int(struct.unpack_from('<I', self._page, 12)[0])

    def close(self) -> None:
        self._page.close()
        self._file.close()
