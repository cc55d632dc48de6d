"""The tests here write many checkpoints: into memory, as a disk takes long to keep them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes

MEMORY = Path('/dev/shm')
ROOM, PREFIX = 2 << 30, 'freetrain-tests-'


@pytest.fixture(scope='session')
def tmp_path_factory(request: pytest.FixtureRequest) -> Iterator[pytest.TempPathFactory]:
    """As pytest's own, on the disk where there is no room in memory. What passes leaves nothing."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield request.config._tmp_path_factory  # type: ignore[attr-defined]
        return
    for left in MEMORY.glob(f'{PREFIX}*'):  # of a session that was killed
        if not processes.alive(int(left.name.split('-')[2])):
            shutil.rmtree(left, ignore_errors=True)
    base = Path(tempfile.mkdtemp(prefix=f'{PREFIX}{os.getpid()}-', dir=MEMORY))
    trace = request.config.trace.get('tmpdir')
    try:
        yield pytest.TempPathFactory(base / 'own', 3, 'failed', trace, _ispytest=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
