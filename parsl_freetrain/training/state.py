"""What a checkpoint holds: the state of models, optimizers and schedulers, and where in the data training is."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training.prepared import Prepared

FILE = 'state.pt'
FORMAT = 1
_SHOWN = 3


@dataclass(frozen=True)
class Position:
    """Where training is, and what it must go on with.

    Attributes
    ----------
    samples
        Training samples that the state has seen.
    total_samples
        What is trained in total, in samples.
    seed, dataset_size, batch_size, shards
        What the data order (and in reproducible mode the sums) depend on; ``shards`` is 0 in throughput mode.
    checkpoint_s
        The longest that a checkpoint of this trainer has taken, in seconds; 0 unknown.
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
class Saved:
    """A checkpoint's content, read."""

    path: str
    position: Position
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]


def write_state(folder: Path, prepared: Prepared, position: Position) -> None:
    """Write ``state.pt`` into a folder: a dict with the entries 'model', 'optimizer', 'scheduler' ('model_2' and so on).

    Raises
    ------
    BadInput
        If a state holds anything but tensors, numbers, texts and containers: nothing else can be loaded without running code of the file.
    """
    content = {'format': FORMAT, 'position': _plain(asdict(position), 'ctx.state')}
    for kind, things in (('model', prepared.models), ('optimizer', prepared.optimizers), ('scheduler', prepared.schedulers)):
        for name, thing in zip(_names(kind), things, strict=False):
            content[name] = _plain(thing.state_dict(), f'the state of {name}')
    torch.save(content, folder / FILE)


def read_state(path: str) -> Saved:
    """Read a checkpoint; its directory is ``path``. Tensors are on the CPU; no code of the file is run.

    Raises
    ------
    BadInput
        If it is not a checkpoint of this format.
    """
    content = torch.load(Path(path) / FILE, map_location='cpu', weights_only=True)
    if content['format'] != FORMAT:
        raise BadInput(f'Checkpoint {path} has state format {content["format"]}, this version reads {FORMAT}: '
                       f'use the version that wrote it.')
    states = [[content[name] for name in takewhile(content.__contains__, _names(kind))] for kind in ('model', 'optimizer', 'scheduler')]
    return Saved(path, Position(**content['position']), *states)


def restore(prepared: Prepared, saved: Saved) -> None:
    """Bring models, optimizers and schedulers to a saved state.

    Raises
    ------
    BadInput
        If it is the state of something else; nothing has been changed then as far as models are concerned.
    """
    for kind, now, then in (('models', prepared.models, saved.models), ('optimizers', prepared.optimizers, saved.optimizers),
                            ('schedulers', prepared.schedulers, saved.schedulers)):
        if len(now) != len(then):
            raise BadInput(f'Checkpoint {saved.path} holds {len(then)} {kind} and ctx.prepare was given {len(now)}: '
                           f'give it what the earlier fragments gave it, or start anew in another folder.')
    for i, (model, state) in enumerate(zip(prepared.models, saved.models, strict=True)):
        _check_model(model, state, i, saved.path)
    for model, state in zip(prepared.models, saved.models, strict=True):
        model.load_state_dict(state)
    for i, (optimizer, state) in enumerate(zip(prepared.optimizers, saved.optimizers, strict=True)):
        try:
            optimizer.load_state_dict(state)
        except (ValueError, KeyError) as error:
            raise BadInput(f'The state of optimizer {i} in checkpoint {saved.path} does not fit ({error}): '
                           f'make the optimizer as the earlier fragments did, or start anew in another folder.') from error
    for scheduler, state in zip(prepared.schedulers, saved.schedulers, strict=True):
        scheduler.load_state_dict(state)


def check_position(now: Position, saved: Saved) -> None:
    """Compare what the data order depends on with what it was.

    Raises
    ------
    BadInput
        If it changed between fragments; with both numbers.
    """
    then = saved.position
    for what, name in (('the seed', 'seed'), ("the dataset's length", 'dataset_size'), ('the batch size', 'batch_size'),
                       ('the number of shards (0: throughput mode)', 'shards')):
        old, new = getattr(then, name), getattr(now, name)
        if old != new:
            raise BadInput(f'Since checkpoint {saved.path} {what} has changed from {old} to {new}, so the data order cannot go on: '
                           f'put it back, or start anew in another folder.')


def _names(kind: str) -> Iterator[str]:
    return (kind if i == 1 else f'{kind}_{i}' for i in count(1))


def _check_model(model: torch.nn.Module, state: Mapping[str, Any], number: int, path: str) -> None:
    ours = model.state_dict()
    faults = [f'{name} is missing there' for name in ours if name not in state]
    faults += [f'{name} is unknown here' for name in state if name not in ours]
    shapes = {name: (tuple(theirs.shape), tuple(ours[name].shape)) for name, theirs in state.items()
              if isinstance(theirs, torch.Tensor) and isinstance(ours.get(name), torch.Tensor)}
    faults += [f'{name} has shape {there} there and {here} here' for name, (there, here) in shapes.items() if there != here]
    if faults:
        more = f' and {len(faults) - _SHOWN} more' if len(faults) > _SHOWN else ''
        raise BadInput(f'Checkpoint {path} is of another model than model {number} of ctx.prepare ({"; ".join(faults[:_SHOWN])}{more}): '
                       f'use the model that the earlier fragments trained, or start anew in another folder.')


def _plain(value: Any, where: str) -> Any:
    """The value with numpy scalars made numbers; raises BadInput where it is not plain."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)):
        return value
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: _plain(item, f'{where}, entry {key!r}') for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item, where) for item in value)
    if hasattr(value, 'item') and getattr(value, 'shape', None) == ():
        return value.item()
    raise BadInput(f'A checkpoint holds tensors, numbers, texts and containers of them, but {where} has a {type(value).__name__}: '
                   f'keep it out of the state, or as one of these.')
