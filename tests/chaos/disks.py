"""Small file systems, where root may make one, and what they run out of."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.programs import run_to_end

DISK_MB, INODES = 48, 1000
OPTIONS = f'size={DISK_MB}m,nr_inodes={INODES},mode=0700'


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own at ``folder``, where root may make one; whether it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mounted = (
        not os.geteuid()
        and not run_to_end(['mount', '-t', 'tmpfs', '-o', OPTIONS, 'chaos', folder]).returncode
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(['umount', '-l', str(folder)], check=True)


@contextlib.contextmanager
def full_inodes(folder: Path) -> Iterator[None]:
    """A file system that takes no more files, until the block ends."""
    filler = folder / '.filler'
    filler.mkdir()
    try:
        with contextlib.suppress(OSError):
            for number in range(INODES):
                (filler / str(number)).touch()
        yield
    finally:
        shutil.rmtree(filler)
