"""Damage to checkpoints and to their disk, and a scheduler that does not answer."""

import contextlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parsl_freetrain.host.files import create
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.training.checkpoint.directories import directories, fresh, key, name_of
from parsl_freetrain.training.checkpoint.manifest import MARKER, is_committed


def _newest(folder: Path) -> tuple[Path, list[Path]]:
    """A trainer's newest committed checkpoint and its files, the largest last."""
    found = next((path for path in reversed(directories(folder)) if is_committed(path)), None)
    if found is None:
        raise FileNotFoundError(folder)
    files = [path for path in sorted(found.rglob('*')) if path.is_file() and path.name != MARKER]
    return found, sorted(files, key=lambda path: path.stat().st_size)


def corrupt_checkpoint(folder: Path, *, seed: int = 0, bits: int = 1) -> None:
    """Flip bits in the largest file of a trainer's newest checkpoint, as a bad disk does."""
    victim, draw = _newest(folder)[1][-1], random.Random(seed)
    with victim.open('r+b') as file:
        for _ in range(bits):
            place = draw.randrange(victim.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
        file.flush()
        os.fsync(file.fileno())


def half_write_checkpoint(folder: Path) -> None:
    """A copy of the newest checkpoint as a fragment leaves it that dies while it writes."""
    newest, files = _newest(folder)
    samples, fragment = key(newest)[:2]
    half = fresh(folder, name_of(samples + 1, fragment))
    for path in files:
        data = path.read_bytes()
        target = half / path.relative_to(newest)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(data[: len(data) // 2] if path == files[-1] else data)


def flip(file: Path, at: int = -1) -> None:
    """One bit of a byte of a file is another one."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fill the small file system of ``folder``, to the last byte, until the block ends."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    assert free <= 1 << 30, f'{folder} has {free} bytes free'
    filler = folder / f'.filler-{secrets.token_hex(8)}'
    try:
        with create(filler) as file:
            for size in (65536, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(file.fileno(), bytes(size))
            yield
    finally:
        filler.unlink()


def scheduler_silent_for(provider: BackfillProvider, seconds: float) -> None:
    """Make queries for jobs fail for some seconds, as if the scheduler did not answer."""
    until = time.monotonic() + seconds
    site: Any = provider.site
    answer = site.statuses

    def statuses(job_ids: list[str]) -> Any:
        if time.monotonic() < until:
            raise TimeoutError('the scheduler does not answer, as a test wants it')
        if site.__dict__.get('statuses') is statuses:
            del site.statuses
        return answer(job_ids)

    site.statuses = statuses
