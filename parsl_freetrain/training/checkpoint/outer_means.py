"""What an outer step makes, tensor by tensor, from the states of all replicas."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.manifest import SHARED, Damaged
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.safetensors_io import Piece
from parsl_freetrain.training.checkpoint.source import PartReader
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.transport import Disk
from parsl_freetrain.training.spec.diloco import Nesterov

MOMENTUM = 'momentum '
_KINDS = 'model', 'ema', 'own'
Weights = Mapping[str, str]
"""All names of the trained parameters, each with the first name of the same one (tied ones)."""


class EndDamaged(FreeTrainError):
    """A replica's state at the end of a round, in ``path``, is not what was committed."""

    def __init__(self, path: Path, damage: Damaged) -> None:
        super().__init__(str(damage))
        self.path = path


class End:
    """A replica's state at the end of a round, whose tensors are read one by one. ``path``: of the
    checkpoint that it is in.
    """

    def __init__(
        self,
        contents: Contents,
        reader: PartReader,
        position: Mapping[str, Any],
        metrics: Mapping[str, float],
        path: Path | None = None,
    ) -> None:
        self._reader, self._path, self.metrics = reader, path, metrics
        self.weights: Weights = position['weights']
        self.round, self.begun = position['round_ended'], position['round_from']
        self.shared = {  # frozen, so that each replica's own folder has it
            (name, chunk.marks)
            for name, entry in contents.tensors.items()
            for chunk in entry.chunks
            if chunk.at[0].startswith(SHARED)
        }
        shapes = reader.shapes()
        self.held = {
            name: (dtype, shapes[name])
            for name in once(shapes, self.weights)
            if takes_part(name, dtype := reader.dtype(name))
        }

    @classmethod
    def of(cls, end: Checkpoint) -> 'End':
        """What a replica has committed. Raises EndDamaged."""
        path = Path(end.path)
        try:
            contents = Contents.read(path)
            reader = PartReader(contents, Disk(path, contents.files))
            position = reader.structure()['rest']['position']
        except Damaged as damage:
            raise EndDamaged(path, damage) from damage
        return cls(contents, reader, position, end.metrics, path)

    def whole(self, name: str) -> torch.Tensor:
        try:
            return self._reader.whole(name)
        except Damaged as damage:
            if self._path is None:
                raise
            raise EndDamaged(self._path, damage) from damage

    def change(self, name: str, began: torch.Tensor, how: str) -> torch.Tensor:
        """What the round has changed, with the sign turned, as it is after compression."""
        return decompressed(compressed(began - self.whole(name).to(began.dtype), how), how, began)


def end_of_round(store: PosixCheckpointStore, samples: int) -> End | None:
    """A replica's state there, before the outer step. None: it has gone on. Or EndDamaged."""
    there = (End.of(one) for one in reversed(store.checkpoints()) if one.samples == samples)
    return next((end for end in there if end.round), None)


_GROUP = 256  # numbers that share a scale


def compressed(change: torch.Tensor, how: str) -> torch.Tensor:
    """The bytes of a change: 'bfloat16', or 'int8' and a float32 for each group, rounded to the
    nearest. What is not finite makes its group NaN. Single operations, the same on any CPU.
    """
    flat = (torch.view_as_real(change) if change.is_complex() else change).reshape(-1)
    if how == 'bfloat16':
        return flat.to(torch.bfloat16).view(torch.uint8)
    groups = torch.nn.functional.pad(flat, (0, -flat.numel() % _GROUP)).view(-1, _GROUP)
    scale = (groups.abs().amax(1, keepdim=True) / 127).float()
    steps = (groups / scale).round().nan_to_num().clamp(-127, 127).to(torch.int8)
    scales = scale.view(-1).view(torch.uint8).view(-1, 4)
    return torch.cat([steps.view(torch.uint8), scales], 1).view(-1)


def compressed_size(dtype: torch.dtype, shape: Sequence[int], how: str) -> int:
    count = math.prod(shape) * (1 + dtype.is_complex)
    return 2 * count if how == 'bfloat16' else -(-count // _GROUP) * (_GROUP + 4)


def decompressed(content: torch.Tensor, how: str, like: torch.Tensor) -> torch.Tensor:
    """A change of the shape and type of ``like``."""
    plain = like.dtype.to_real()
    if how == 'bfloat16':
        flat = content.view(torch.bfloat16).to(plain)
    else:
        rows = content.view(-1, _GROUP + 4)
        scale = rows[:, _GROUP:].reshape(-1).view(torch.float32).view(-1, 1).to(plain)
        flat = (rows[:, :_GROUP].view(torch.int8).to(plain) * scale).view(-1)
    if like.is_complex():
        return torch.view_as_complex(flat[: 2 * like.numel()].view(*like.shape, 2))
    return flat[: like.numel()].view(like.shape)


class Made:
    """What an outer step makes, tensor by tensor, as it is written. ``began``: the weights with
    which the round began, where those are not the ones before; ``how`` changes are compressed.
    """

    def __init__(
        self,
        before: PartReader,
        began: PartReader | None,
        ends: Sequence[End],
        outer: Nesterov | None,
        how: str | None,
    ) -> None:
        self._before, self._began, self._ends, self._outer = before, began, ends, outer
        self._how = how
        self._had_momentum = before.shapes(MOMENTUM)
        self._momentum: dict[str, torch.Tensor] = {}
        first = ends[0]
        self._left_out = {name for name, _ in first.shared.intersection(*(e.shared for e in ends))}
        self._weights = first.weights
        if not set(first.weights.values()) <= first.held.keys():
            raise BadInput(
                'A trained parameter is of a subclass of Tensor that consists of several tensors, '
                'of which no mean can be taken: use plain parameters with mode=DiLoCo(...).'
            )
        for number, end in enumerate(ends):
            if (end.weights, end.held) != (first.weights, first.held):
                raise FreeTrainError(
                    f'Replica {number} has trained other parameters than replica 0: the function '
                    'must build the same model in each, whatever its samples.'
                )

    def pieces(self) -> list[Piece]:
        found = []
        for name, (dtype, shape) in self._ends[0].held.items():
            if name in self._left_out:
                continue
            if name not in self._weights:
                found.append(Piece(name, dtype, shape, partial(self._mean, name)))
                continue
            dtype = precise(dtype)
            found.append(Piece(name, dtype, shape, partial(self._weight, name)))
            if self._outer is not None:  # written next, since it has the same type
                get = partial(self._momentum.pop, name)
                found.append(Piece(MOMENTUM + name, dtype, shape, get))
        return found

    def _weight(self, name: str) -> torch.Tensor:
        if not (self._outer or self._began or self._how):
            return _mean(end.whole(name) for end in self._ends)
        before = self._before.whole(name)
        began = before if self._began is None else self._began.whole(name)
        if self._how:
            gradient = _mean(end.change(name, began, self._how) for end in self._ends)
        else:
            gradient = began - _mean(end.whole(name) for end in self._ends)
        if self._outer is None:
            return before - gradient
        momentum = gradient
        if MOMENTUM + name in self._had_momentum:
            momentum = self._before.whole(MOMENTUM + name) * self._outer.momentum + gradient
        self._momentum[name] = momentum
        return before - (momentum * self._outer.momentum + gradient) * self._outer.lr

    def _mean(self, name: str) -> torch.Tensor:
        """Of what is not trained, such as batch statistics. What all have alike stays."""
        first, *others = every = [end.whole(name) for end in self._ends]
        same = all(torch.equal(first, other) for other in others)
        return first if same else _mean(every).to(first.dtype)


def _mean(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    each = iter(tensors)
    total, count = next(each), 1
    total = total.to(precise(total.dtype))
    for one in each:
        total, count = total + one.to(total.dtype), count + 1
    return total / count


def precise(dtype: torch.dtype) -> torch.dtype:
    """What outer steps compute in, and keep: float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def once(names: Iterable[str], weights: Weights) -> list[str]:
    return [name for name in names if weights.get(name, name) == name]


def named(*several: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What takes part, by name in a state: models, averages of models, parameters of none."""
    for kind, things in zip(_KINDS, several, strict=True):
        yield from zip(st.names_of(kind), things, strict=False)


def is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def takes_part(name: str, dtype: torch.dtype) -> bool:
    return is_real(dtype) and name.partition('.')[0].partition('_')[0] in _KINDS
