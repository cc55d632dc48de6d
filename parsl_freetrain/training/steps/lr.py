"""Learning rates independent of the number of nodes: by samples, and scaled mode's factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


def by_samples(
    optimizer: torch.optim.Optimizer, factor: Callable[[int], float], samples: Callable[[], int]
) -> LambdaLR:
    """A scheduler whose ``step()`` sets the initial learning rate times ``factor(samples())``."""
    return LambdaLR(optimizer, lambda _: factor(samples()))


def scale_steps(optimizers: Iterable[torch.optim.Optimizer], factor: Callable[[], float]) -> None:
    """Multiply the learning rate by ``factor()`` during every step, not in between."""
    kept: dict[int, list[Any]] = {}

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        times = factor()
        kept[id(optimizer)] = [group['lr'] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group['lr'] = group['lr'] * times

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group, lr in zip(optimizer.param_groups, kept.pop(id(optimizer)), strict=True):
            group['lr'] = lr

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
