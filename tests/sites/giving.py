"""Blocks on a real scheduler that train nothing, and are given back as a run's are."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from parsl_freetrain.core.controller.nodes_to_give import nodes_to_give
from parsl_freetrain.sites.batch.site import BatchSite
from tests.sites.batch_blocks import Blocks
from tests.support.other_user import OTHER, as_other_user
from tests.support.real_cluster import RealCluster

# For an hour, and not less.
LASTS: dict[str, Any] = {'start_s': 1.0, 'longest_s': 3600.0, 'shrink': 1.0}


def give(folder: Path, over: Event, site: BatchSite, blocks: int = 2) -> None:
    """So many blocks of one node; the file ``runs`` says that all have theirs."""
    mine = Blocks(folder / 'blocks', site)
    for _ in range(blocks):
        mine.running(1, walltime_s=None)
    (folder / 'runs').touch()
    while not over.wait(0.2):
        mine.provider.status(mine.jobs)
        demands, held = mine.site.needed()
        names = nodes_to_give(demands, held, {}, {}) if demands else frozenset()
        if leave := [each.block for each in held if names.intersection(each.nodes)]:
            mine.provider.cancel(leave)
    mine.provider.cancel(mine.jobs)


@contextmanager
def folders(*owners: int) -> Iterator[list[Path]]:
    """Of these users, where each may write."""
    with tempfile.TemporaryDirectory(prefix='ft-', dir='/tmp', ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        made = [Path(name, str(number)) for number in range(len(owners))]
        for folder, owner in zip(made, owners, strict=True):
            folder.mkdir()
            os.chown(folder, owner, -1)
        yield made


@contextmanager
def two_users(
    cluster: RealCluster, site: Callable[[], BatchSite], other: int = OTHER
) -> Iterator[None]:
    """The sites of two users, with two blocks each, that give back what they do not train on."""
    over = Event()
    time.strptime('2026', '%Y')  # imports a module that the other user could not
    with folders(os.geteuid(), other) as (own, theirs), ThreadPoolExecutor() as pool:
        try:
            with as_other_user(lambda: give(theirs, over, site()), other):
                cluster.wait(lambda: (theirs / 'runs').exists())
                giving = pool.submit(give, own, over, site())
                cluster.wait(lambda: giving.done() or (own / 'runs').exists())
                yield
        finally:
            over.set()
    giving.result()
