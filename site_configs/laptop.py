"""This computer: slots as nodes, always idle or following a schedule. Copy this and change it."""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, LocalSite


def site(nodes: int = 2, schedule: str | None = None) -> LocalSite:
    """``nodes`` slots of this computer: ``FreeTrainExecutor(site='laptop')``."""
    return LocalSite(nodes=nodes, schedule=schedule)


def config(
    nodes: int = 2, schedule: str | None = None, checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on ``nodes`` slots of this computer."""
    provider = BackfillProvider(site=site(nodes, schedule))
    return Config(executors=[FreeTrainExecutor(provider=provider, checkpoint_dir=checkpoint_dir)])
