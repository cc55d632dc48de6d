"""This computer: some slots as nodes, always idle or as a schedule of holes says. Copy and change."""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain.executor import FreeTrainExecutor
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider


def config(nodes: int = 2, schedule: str | None = None, checkpoint_dir: str = 'checkpoints') -> Config:
    """A Parsl configuration whose only executor trains on ``nodes`` slots of this computer."""
    site = LocalSite(nodes=nodes, schedule=schedule)
    return Config(
        executors=[FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir=checkpoint_dir)],
        strategy='none',  # the executor opens and closes its blocks itself
    )
