"""A small training for tests, which takes seconds. Ranks import this file, and no Parsl."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.loop.context import FragmentContext


def fit(ctx: FragmentContext, pause_s: float = 0.0, fail_at: int | None = None) -> None:
    """Fit a line with dropout and momentum on 96 samples; pauses per batch, can raise."""
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
