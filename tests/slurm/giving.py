"""Blocks on a real Slurm that train nothing, and are given back as a run's are."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from parsl_freetrain.core.controller.nodes_to_give import nodes_to_give
from tests.sites.batch_blocks import Blocks
from tests.sites.slurm.conftest import slurm_site


def give(folder: Path, over: Event, blocks: int = 2) -> None:
    """So many blocks of one node, for an hour; the file ``runs`` says that all have theirs."""
    mine = Blocks(folder / 'blocks', slurm_site(start_s=1.0, longest_s=3600.0, shrink=1.0))
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
