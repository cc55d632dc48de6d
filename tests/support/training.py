"""A small training for tests, which takes seconds, and a Parsl configuration to run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parsl
import torch
from parsl.config import Config
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FreeTrainExecutor, HtexOptions, Policy, Timeouts
from parsl_freetrain.core.model.settings import Settings
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.sites.protocols import Site
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.loop.context import FragmentContext


def fit(ctx: FragmentContext, pause_s: float = 0.0, fail_at: int | None = None) -> None:
    """Fit a line with dropout and momentum on 96 samples; it pauses for ``pause_s`` seconds per
    batch, and raises at sample ``fail_at``.
    """
    import time

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
        if fail_at is not None and ctx.samples >= fail_at:
            raise ValueError(f'no more after {fail_at} samples')
        optimizer.zero_grad()
        loss = ((model(features) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
        time.sleep(pause_s)


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model's state in a checkpoint."""
    return load_weights(checkpoint)


@contextmanager
def freetrain(
    folder: Path, site: Site, *, parsl_retries: int = 0, **settings: Any
) -> Iterator[FreeTrainExecutor]:
    """A loaded Parsl configuration with one FreeTrainExecutor on ``site``, its files in
    ``folder``. Settings of a group may be given by name: ``hang_s=4`` is
    ``timeouts=Timeouts(hang_s=4)``.
    """
    settings = {'max_workers_per_node': 0, 'horizon_s': 20.0, **settings}
    groups: dict[str, type[Settings]] = {
        'policy': Policy,
        'timeouts': Timeouts,
        'htex': HtexOptions,
    }
    grouped: dict[str, Any] = {
        name: kind(**{f: settings.pop(f) for f in kind.__struct_fields__ if f in settings})
        for name, kind in groups.items()
    }
    executor = FreeTrainExecutor(
        provider=BackfillProvider(
            site=site,
            min_hole_s=settings.pop('min_hole_s', 1.0),
            environment=settings.pop('environment', None),
        ),
        checkpoint_dir=str(folder / 'checkpoints'),
        **grouped,
        **settings,
    )
    with parsl.load(
        Config(
            executors=[executor],
            strategy='none',
            retries=parsl_retries,
            run_dir=str(folder / 'runinfo'),
        )
    ):
        yield executor
