"""What a checkpoint holds: the state of models, optimizers, schedulers and scalers, and the
position in the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.dcp import load_all, save, tensor_differences
from parsl_freetrain.training.checkpoint.flatten import put_together, take_apart
from parsl_freetrain.training.checkpoint.parameter_names import (
    by_name,
    by_number,
    is_by_name,
    parameter_names,
)
from parsl_freetrain.training.checkpoint.trainables import Prepared

_KINDS = {
    'model': 'models',
    'optimizer': 'optimizers',
    'scheduler': 'schedulers',
    'scaler': 'scalers',
    'ema': 'averages',
}
_STRUCTURE = 'structure'
_ANEW = 'or start anew in another folder'


@dataclass(frozen=True)
class Position:
    """The position in the data, and what must not change when training continues.

    Attributes
    ----------
    samples
        Training samples that the state has seen.
    total_samples
        Total number of samples to train.
    seed, dataset_size, batch_size, shards
        What the data order depends on, and in reproducible mode the sums. ``shards`` is 0 in
        throughput mode.
    checkpoint_s
        Longest time that a checkpoint of this trainer has taken, in seconds; 0: unknown.
    user
        The user's ``ctx.state``.
    """

    samples: int
    total_samples: int
    seed: int
    dataset_size: int
    batch_size: int
    shards: int
    checkpoint_s: float = 0.0
    user: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """A state to save, split into tensors and the rest.

    Attributes
    ----------
    tensors
        By names such as 'model.0.weight' and 'optimizer.state.0.exp_avg'.
    structure
        Everything else.
    """

    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write it into an empty folder. Nothing is exchanged with other ranks."""
        save(folder, {**self.tensors, _STRUCTURE: self.structure})


@dataclass(frozen=True)
class Saved:
    """A checkpoint's content, read.

    ``classes`` has the class names of 'optimizer', 'scheduler_2' and so on.
    """

    path: str
    position: Position
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    scalers: list[dict[str, Any]] = field(default_factory=list)
    averages: list[dict[str, Any]] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)


def content_of(prepared: Prepared, *, named: bool = False) -> dict[str, Any]:
    """The states of everything, as 'model', 'optimizer', 'scheduler', 'scaler', 'model_2' and so
    on. The tensors are the live ones.

    ``named``: keep states of optimizers by the names of parameters, so that models may be divided
    differently when they are loaded.
    """
    things = {
        name: thing
        for kind, field_ in _KINDS.items()
        for name, thing in zip(_names(kind), getattr(prepared, field_), strict=False)
    }
    content: dict[str, Any] = {name: thing.state_dict() for name, thing in things.items()}
    if named:
        names = parameter_names(prepared)
        content.update(
            (name, by_name(optimizer, names))
            for name, optimizer in zip(_names('optimizer'), prepared.optimizers, strict=False)
        )
    return {**content, 'classes': {name: type(thing).__name__ for name, thing in things.items()}}


def collect(content: Mapping[str, Any], position: Position) -> State:
    """The state to save: the result of :func:`content_of`, and the position.

    It has no state of random number generators, since every turn is seeded by the seed and the
    position.

    Raises
    ------
    BadInput
        If a state holds anything but tensors, numbers, texts and containers, since nothing else can
        be loaded without running code of the file.
    """
    called = {name: f'the state of {name}' for name in content['classes']}
    return State(
        *take_apart(
            {**content, 'position': {**vars(position)}}, {'position': 'ctx.state', **called}
        )
    )


def read_state(path: str) -> Saved:
    """Read the checkpoint in the directory ``path``. Tensors are on the CPU. No code of the file is
    run.

    Raises
    ------
    BadInput
        If it is not a checkpoint of this format.
    """
    tensors = load_all(Path(path))
    return assemble(path, State(tensors, tensors.pop(_STRUCTURE)))


def assemble(path: str, state: State) -> Saved:
    """A checkpoint's content from a split state. ``path`` is the checkpoint with the same
    content.
    """
    content = put_together(state.tensors, state.structure)
    states = {
        several: [content[name] for name in takewhile(content.__contains__, _names(kind))]
        for kind, several in _KINDS.items()
    }
    return Saved(path, Position(**content['position']), classes=content['classes'], **states)


def restore(prepared: Prepared, saved: Saved, *, parts: bool = False) -> None:
    """Set models, optimizers, schedulers and scalers to a saved state. ``parts``: the models may be
    parts of those that were saved.

    Raises
    ------
    BadInput
        If the state does not fit; the models have not been changed then.
    """
    for kind, several in _KINDS.items():
        now, then = getattr(prepared, several), getattr(saved, several)
        if kind == 'ema' and not now:
            continue  # made after ctx.prepare, which then loads them
        if len(now) != len(then):
            raise BadInput(
                f'Checkpoint {saved.path} holds {len(then)} {several} and ctx.prepare '
                f'was given {len(now)}: give it the same as in earlier fragments, {_ANEW}.'
            )
        if kind == 'model':
            continue
        for name, thing in zip(_names(kind), now, strict=False):
            made, was = type(thing).__name__, saved.classes.get(name)
            if was is not None and was != made:
                raise BadInput(
                    f'The {name} in checkpoint {saved.path} was of class {was} and '
                    f'ctx.prepare was given {made}: '
                    f'make it as the earlier fragments did, {_ANEW}.'
                )
    states = {several: list(getattr(saved, several)) for several in _KINDS.values()}
    if parts:
        states['models'] = [
            {name: state[name] for name in model.state_dict() if name in state}
            for model, state in zip(prepared.models, saved.models, strict=True)
        ]
    for i, (model, state) in enumerate(zip(prepared.models, states['models'], strict=True)):
        _check_model(model, state, i, saved.path)
    names = parameter_names(prepared)
    for kind, several in _KINDS.items():
        for name, thing, state in zip(
            _names(kind), getattr(prepared, several), states[several], strict=False
        ):
            try:
                thing.load_state_dict(
                    by_number(state, thing, names)
                    if kind == 'optimizer' and is_by_name(state)
                    else state
                )
            except (ValueError, KeyError, RuntimeError) as error:
                raise BadInput(
                    f'The state of {name} in checkpoint {saved.path} does not fit ({error}): '
                    f'make it as the earlier fragments did, {_ANEW}.'
                ) from error


def restore_average(average: torch.nn.Module, saved: Saved, number: int) -> None:
    """Set a moving average to a saved state; ``number`` counts from 0.

    Raises
    ------
    BadInput
        If the checkpoint has fewer averages.
    """
    if number >= len(saved.averages):
        check_averages(saved, (average,) * (number + 1))
    _check_model(average, saved.averages[number], number, saved.path)
    average.load_state_dict(saved.averages[number])


def check_averages(saved: Saved, now: Sequence[torch.nn.Module]) -> None:
    """Check the number of moving averages; raises BadInput if it has changed."""
    if len(now) != len(saved.averages):
        raise BadInput(
            f'Checkpoint {saved.path} holds {len(saved.averages)} moving averages and ctx.ema was '
            f'called for {len(now)}: call it as the earlier fragments did, {_ANEW}.'
        )


def check_position(now: Position, saved: Saved) -> None:
    """Check that what the data order depends on is the same as in the checkpoint.

    Raises
    ------
    BadInput
        If something has changed, with both numbers.
    """
    then = saved.position
    for what, name in (
        ('the seed', 'seed'),
        ("the dataset's length", 'dataset_size'),
        ('the batch size', 'batch_size'),
        ('the number of shards (0: throughput mode)', 'shards'),
    ):
        old, new = getattr(then, name), getattr(now, name)
        if old != new:
            raise BadInput(
                f'Since checkpoint {saved.path} {what} has changed from {old} to {new}, '
                'so the data order cannot continue: '
                f'put it back, or start anew in another folder.'
            )


def _names(kind: str) -> Iterator[str]:
    return (kind if i == 1 else f'{kind}_{i}' for i in count(1))


def _check_model(model: torch.nn.Module, state: Mapping[str, Any], number: int, path: str) -> None:
    if faults := tensor_differences(_shapes(state), _shapes(model.state_dict())):
        raise BadInput(
            f'Checkpoint {path} is of another model than model {number} of ctx.prepare ({faults}): '
            f'use the model that the earlier fragments trained, {_ANEW}.'
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)
    }
