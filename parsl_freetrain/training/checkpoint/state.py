"""What a checkpoint holds: states of models, optimizers, schedulers, scalers, and the position."""

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import optimizer_state
from parsl_freetrain.training.checkpoint.block_digests import FileImage
from parsl_freetrain.training.checkpoint.flatten import put_together, take_apart
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.parts import Blocks, Contents, part_of, write_contents
from parsl_freetrain.training.checkpoint.trainables import Prepared

_KINDS = {
    'model': 'models',
    'optimizer': 'optimizers',
    'scheduler': 'schedulers',
    'scaler': 'scalers',
    'ema': 'averages',
    'own': 'own',
}
_SHOWN = 5
_ANEW = 'or give the trainer another name or folder, to start anew'


@dataclass(frozen=True)
class Position:
    """The position in the data, and what must not change when training continues."""

    samples: int  #: training samples that the state has seen
    total_samples: int  #: total number of samples to train
    #: seed, dataset_size, batch_size, shards: the data order depends on them; shards 0: throughput.
    seed: int
    dataset_size: int
    batch_size: int
    shards: int
    #: Longest time that a checkpoint of this trainer has taken, in seconds; 0: unknown.
    checkpoint_s: float = 0.0
    user: dict[str, Any] = field(default_factory=dict)  #: the user's ``ctx.state``
    #: loop, base: number of the function's loop, from 1; samples that its earlier loops trained.
    loop: int = 1
    base: int = 0
    epoch: int = 0  #: number of epochs of that loop that have ended
    #: Whether what is done at the end of an epoch is still to be done for the last one.
    epoch_due: bool = False
    finishing: str = ''  #: why the training is to end before the total; empty: it is not
    #: finished, result: whether the function has returned, and what, as JSON.
    finished: bool = False
    result: str = ''
    #: Digests of some samples of a stream, by number.
    marks: dict[str, str] = field(default_factory=dict)
    order: str = ''  #: the name of the order of the samples; empty: unknown
    #: Sums over the epoch of what was reported: as fractions, and numbers of samples.
    means: dict[str, list[Any]] = field(default_factory=dict)
    #: Some of what the dataset had at the beginning of the fragment or of the epoch.
    looks: dict[str, list[Any]] = field(default_factory=dict)
    fragment: int = 0  #: the fragment that came so far
    #: resumes, verified: how often the training went on, and how often that was verified.
    resumes: int = 0
    verified: int = 0
    #: At a round's end before its outer step: its number, from 1, and its weights; else 0.
    round_ended: int = 0
    round_from: str = ''  #: the digest of the weights with which its round began
    weights: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """A state to save, split into tensors and the rest."""

    #: By names such as 'model.0.weight' and 'optimizer.state.0.exp_avg'; or this rank's parts.
    tensors: dict[str, torch.Tensor]
    structure: dict[str, Any] | None  #: everything else; None: another rank writes it
    #: Which part of the whole a tensor is; those that are not named are whole.
    boxes: dict[str, Box] = field(default_factory=dict)
    image: FileImage | None = None  #: the tensors' file in memory, if they are views of one
    shared: Contents | None = None  #: the tensors that are in files of several checkpoints

    def write(self, folder: Path) -> Blocks:
        """Write it into an empty folder, alone. Returns the digests of the blocks of the files."""
        return write_contents(folder, [self.part(0, folder)])

    def part(self, rank: int, folder: Path | None = None) -> Contents:
        """This rank's part, its tensors written into a folder with the other ranks', if any."""
        part = part_of(rank, self.tensors, self.boxes, self.structure, self.image, folder)
        if (shared := self.shared) is None:
            return part
        tensors, files = {**part.tensors, **shared.tensors}, {**part.files, **shared.files}
        return Contents(tensors, files, part.structure)


class Source(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def position(self) -> Position: ...
    def load(self, prepared: Prepared | None = None) -> 'Saved':
        """Its content, divided as the prepared models are. All ranks call this together."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint's content. ``classes``: by 'optimizer' ...; ``groups``: their parameters."""

    path: str
    position: Position
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    scalers: list[dict[str, Any]] = field(default_factory=list)
    averages: list[dict[str, Any]] = field(default_factory=list)
    own: list[dict[str, Any]] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)

    def load(self, prepared: Prepared | None = None) -> 'Saved':
        return self


def content_of(prepared: Prepared, *, named: bool = False) -> dict[str, Any]:
    things: dict[str, Any] = {}
    for kind, several in _KINDS.items():
        things |= zip(names_of(kind), getattr(prepared, several), strict=False)
    content: dict[str, Any] = {name: thing.state_dict() for name, thing in things.items()}
    names = optimizer_state.parameter_names(prepared)
    optimizers = dict(zip(names_of('optimizer'), prepared.optimizers, strict=False))
    for name, one in optimizers.items():
        state = optimizer_state.state_of(one)
        content[name] = optimizer_state.by_name(one, state, names) if named else state
    return {
        **content,
        'adapters': {
            name: json.dumps(
                how.to_dict(), default=lambda v: [*v] if isinstance(v, set) else str(v)
            )
            for model in prepared.models
            for name, how in getattr(model, 'peft_config', {}).items()
        },
        'classes': {name: type(thing).__name__ for name, thing in things.items()},
        'groups': dict(zip(optimizers, optimizer_state.orders(prepared), strict=False)),
    }


def collect(content: Mapping[str, Any], position: Position) -> State:
    """:func:`content_of` and the position; BadInput for what only code of the file could load."""
    called = {name: f'the state of {name}' for name in content['classes']}
    position_too = {**content, 'position': {**vars(position)}}
    return State(*take_apart(position_too, {'position': 'ctx.state', **called}))


def assemble(path: str, state: State) -> Saved:
    """A checkpoint's content from a split state; ``path``: of the checkpoint with it."""
    assert state.structure is not None
    content = put_together(state.tensors, state.structure)
    states: dict[str, Any] = {
        several: [content[name] for name in takewhile(content.__contains__, names_of(kind))]
        for kind, several in _KINDS.items()
    }
    states.update(
        (name, content.get(name, {})) for name in ('classes', 'groups', 'modules', 'variables')
    )
    return Saved(path, Position(**content['position']), **states)


def restore(prepared: Prepared, saved: Saved, *, parts: bool = False) -> None:
    """Set all to a saved state or its ``parts``; BadInput, before any change, if it misfits."""
    for kind, several in _KINDS.items():
        now, then = getattr(prepared, several), getattr(saved, several)
        if kind == 'ema' and len(now) < len(then):
            continue  # ctx.ema makes the others after ctx.prepare, and loads them
        if len(now) != len(then):
            raise BadInput(
                f'Checkpoint {saved.path} holds {len(then)} {several} and ctx.prepare '
                f'was given {len(now)}: give it the same as in earlier fragments, {_ANEW}.'
            )
        if kind == 'model':
            continue
        for name, thing in zip(names_of(kind), now, strict=False):
            made, was = type(thing).__name__, saved.classes.get(name)
            if was is not None and was != made:
                raise BadInput(
                    f'The {name} in checkpoint {saved.path} was of class {was} and '
                    f'ctx.prepare was given {made}: make it as the earlier fragments did, {_ANEW}.'
                )
    states = {several: list(getattr(saved, several)) for several in _KINDS.values()}
    if parts:
        states['models'] = [
            {name: state[name] for name in model.state_dict() if name in state}
            for model, state in zip(prepared.models, saved.models, strict=True)
        ]
    for i, (model, state) in enumerate(zip(prepared.models, states['models'], strict=True)):
        _check_model(model, state, i, saved.path)
    names = optimizer_state.parameter_names(prepared)
    both = zip(prepared.models, states['models'], strict=True)
    keep_types = all(_types(model.state_dict()) == _types(state) for model, state in both)
    for kind, several in _KINDS.items():
        here = zip(names_of(kind), getattr(prepared, several), states[several], strict=False)
        for name, thing, state in here:
            try:
                if kind == 'optimizer':
                    optimizer_state.add_groups(thing, saved.groups[name], prepared)
                    state = optimizer_state.by_number(state, thing, names)
                    optimizer_state.load(thing, state, keep_types=keep_types)
                else:
                    thing.load_state_dict(copy(state))  # neuraloperator takes entries out
            except (ValueError, KeyError, RuntimeError) as error:
                raise BadInput(
                    f'The state of {name} in checkpoint {saved.path} does not fit ({error}): '
                    f'make it as the earlier fragments did, {_ANEW}.'
                ) from error


def restore_average(average: torch.nn.Module, saved: Saved, number: int) -> None:
    """Set moving average ``number``, from 0, to a saved one; BadInput if there are fewer."""
    if number >= len(saved.averages):
        check_averages(saved, (average,) * (number + 1))
    _check_model(average, saved.averages[number], number, saved.path)
    average.load_state_dict(saved.averages[number])


def check_averages(saved: Saved, now: Sequence[torch.nn.Module]) -> None:
    """Check the number of moving averages; raises BadInput if it has changed."""
    if len(now) != len(saved.averages):
        raise BadInput(
            f'Checkpoint {saved.path} holds {len(saved.averages)} moving averages and there are '
            f'{len(now)}, by ctx.ema and ctx.prepare: make them as the earlier fragments did, '
            f'{_ANEW}.'
        )


def check_position(now: Position, saved: Source) -> None:
    """Refuse (BadInput, with both numbers) another data order than the checkpoint's."""
    then = saved.position
    for what, name in (
        ('the seed', 'seed'),
        ("the dataset's length", 'dataset_size'),
        ('the batch size', 'batch_size'),
        ('the number of shards (0: throughput mode)', 'shards'),
        ('the order of the samples', 'order'),
    ):
        old, new = getattr(then, name), getattr(now, name)
        if old != new and old != '':
            raise BadInput(
                f'Since checkpoint {saved.path} {what} has changed from {old} to {new}, so the '
                f'data order cannot continue: put it back, {_ANEW}.'
            )


def names_of(kind: str) -> Iterator[str]:
    """The names of things of a kind, such as 'model', 'model_2' and so on."""
    return (kind if i == 1 else f'{kind}_{i}' for i in count(1))


def _check_model(model: torch.nn.Module, state: Mapping[str, Any], number: int, path: str) -> None:
    check_shapes(shapes_of(model.state_dict()), shapes_of(state), number, path)


def check_shapes(
    here: Mapping[str, tuple[int, ...]],
    there: Mapping[str, tuple[int, ...]],
    number: int,
    path: str,
) -> None:
    """BadInput, with the first differences, unless a model's names and shapes fit."""
    faults = [f'{name} is missing there' for name in here if name not in there]
    faults += [f'{name} is unknown here' for name in there if name not in here]
    both = [(name, shape, here[name]) for name, shape in there.items() if name in here]
    faults += [f'{k} has shape {was} there and {now} here' for k, was, now in both if was != now]
    if faults:
        more = f' and {len(faults) - _SHOWN} more' if len(faults) > _SHOWN else ''
        raise BadInput(
            f'Checkpoint {path} is of another model than model {number + 1} of ctx.prepare '
            f'({"; ".join(faults[:_SHOWN])}{more}): use the model that '
            f'the earlier fragments trained, {_ANEW}.'
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    every = state.items()
    return {name: tuple(one.shape) for name, one in every if isinstance(one, torch.Tensor)}


def _types(state: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}
