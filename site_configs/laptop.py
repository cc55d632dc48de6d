"""This computer: slots as nodes, always idle or following a schedule. Copy this and change it."""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, LocalSite


def config(
    nodes: int = 2, schedule: str | None = None, checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on ``nodes`` slots of this computer."""
    site = LocalSite(nodes=nodes, schedule=schedule)
    return Config(
        executors=[
            FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir=checkpoint_dir)
        ],
        strategy='none',  # the executor opens and closes its blocks itself
    )
