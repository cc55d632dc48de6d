"""A training that runs through on one rank, and one that is stopped and goes on on others."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks


def made(
    ctx: FragmentContext, inputs: int = 2, outputs: int = 1, lr: float = 0.1, **options: Any
) -> Any:
    """A prepared linear model, and its optimizer."""
    torch.manual_seed(1)
    model = nn.Linear(inputs, outputs)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), **options)


def step(model: Any, optimizer: Any, x: torch.Tensor) -> float:
    """Train on a batch; the loss."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def cut(ctx: FragmentContext, at: int) -> None:
    """Call in the body: the first fragment is told to stop at a number of samples (0: is not)."""
    if ctx.fragment == 1 and 0 < at <= ctx.samples:
        os.kill(os.getpid(), signal.SIGTERM)


def whole_and_cut(
    fork_server: ForkClient,
    folder: Path,
    function: Callable[..., object],
    *args: Any,
    at: int,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights undisturbed, and begun on two ranks and gone on with on one."""
    whole = trained(fork_server, folder / 'whole', [1], function, 0, *args, **options)
    other = trained(fork_server, folder / 'cut', [2, 1], function, at, *args, **options)
    return load_weights(whole.path), load_weights(other.path)


def trained(
    fork_server: ForkClient,
    folder: Path,
    sizes: Sequence[int],
    function: Callable[..., object],
    *args: Any,
    **options: Any,
) -> Any:
    """The outcome of the last of fragments with so many ranks; those before it are stopped."""
    for fragment, size in enumerate(sizes, 1):
        ordered = order(folder, fragment, **options)
        with ranks(fork_server, ordered, size, folder, function, *args) as gang:
            outcomes, log = gang.run(), gang.ranks[0].log
        how = 'finished' if fragment == len(sizes) else 'stopped'
        ended = [outcome.how for outcome in outcomes]
        assert ended == [how] * size, (outcomes[0].error, log.read_text()[-4000:])
    return outcomes[0]


def refused(
    fork_server: ForkClient,
    folder: Path,
    function: Callable[..., object],
    *args: Any,
    world_size: int = 1,
    fragment: int = 1,
    **options: Any,
) -> str:
    """The sentence by which the function is refused."""
    ordered = order(folder, fragment, **options)
    with ranks(fork_server, ordered, world_size, folder, function, *args) as gang:
        errors = [outcome.error for outcome in gang.run() if outcome.how == 'error']
    assert errors and errors[0].type == 'BadInput', errors
    return str(errors[0].message)
