"""Scripts of the documentation with the frameworks they are written for, in fragments."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch

from parsl_freetrain import Checkpoint, FragmentContext, Reproducible, freetrain_app
from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import KILLED, order, ranks

EXAMPLES = Path(__file__).resolve().parents[2] / 'docs' / 'examples'


def example(name: str) -> ModuleType:
    """A script of docs/examples as a module, which ranks get by value."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def in_this_process(function: Callable[..., Any], **options: Any) -> tuple[Checkpoint, Any]:
    """Train undisturbed on one rank, with the mode of :func:`tests.support.ranks.order`. Returns
    the checkpoint and the first model's state.
    """
    kept: list[Any] = []

    def train(ctx: FragmentContext) -> Any:
        kept.append(ctx)
        return function(ctx)

    mode = Reproducible(shards=options.pop('shards', 4), seed=7)
    checkpoint = freetrain_app(**{'mode': mode, **options})(train).debug()
    assert kept[0]._model is not None
    return checkpoint, kept[0]._model.prepared.models[0].state_dict()


def killed_and_rescaled(fork_server: ForkClient, folder: Path, app: FreeTrainApp, at: int) -> Any:
    """Train on one rank until it kills itself between two steps, when it has a checkpoint and at
    least ``at`` samples; then on two ranks to the end, with two checkpoints on the way. Returns the
    last outcome, and the model's state.
    """
    options: dict[str, Any] = {'total_epochs': app.spec.total_epochs, 'checkpoint_every_s': 0.01}
    with ranks(
        fork_server, order(folder, **options), 1, folder, _dies, app.function, folder, at
    ) as gang:
        assert gang.run() == [KILLED], gang.ranks[0].log.read_text()
    second = order(folder, fragment=2, **options)
    with ranks(fork_server, second, 2, folder, _there, app.function, folder) as gang:
        outcomes = gang.run()
        logs = '\n'.join(rank.log.read_text() for rank in gang.ranks)
    assert [outcome.how for outcome in outcomes] == ['finished', 'finished'], logs
    return outcomes[0], load_weights(outcomes[0].path)


def _there(ctx: FragmentContext, function: Callable[..., Any], folder: Path) -> Any:
    os.chdir(folder)  # some make their output folder where they run
    return function(ctx)


def _dies(ctx: FragmentContext, function: Callable[..., Any], folder: Path, at: int) -> Any:
    def die() -> None:
        last = ctx._checkpointer.last
        if ctx.samples >= at and last is not None and last.samples:
            os.kill(os.getpid(), signal.SIGKILL)

    ctx.after_step(die)
    return _there(ctx, function, folder)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
