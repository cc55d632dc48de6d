"""What an outer step makes, tensor by tensor, from the states of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.manifest import SHARED, Damaged
from parsl_freetrain.training.checkpoint.part_reader import PartReader
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.safetensors_io import Piece
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.transport import Disk
from parsl_freetrain.training.spec.diloco import Nesterov

T = TypeVar('T')
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
    def __init__(self, path: Path) -> None:
        self._path = path
        contents = self._guarded(lambda: Contents.read(path))
        reader = self._reader = PartReader(contents, Disk(path, contents.files))
        position = st.Position(**self._guarded(reader.structure)['rest']['position'])
        self.weights, self.round = position.weights, position.round_ended
        self.begun = position.round_from
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
            if name.partition('.')[0].partition('_')[0] in _KINDS
            and is_real(dtype := reader.dtype(name))
        }

    def whole(self, name: str) -> torch.Tensor:
        return self._guarded(lambda: self._reader.whole(name))

    def _guarded(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Damaged as damage:
            raise EndDamaged(self._path, damage) from damage


def end_of_round(store: PosixCheckpointStore, samples: int) -> Checkpoint | None:
    """A replica's state there, before the outer step. None: it has gone on. Or EndDamaged."""
    there = (one for one in reversed(store.checkpoints()) if one.samples == samples)
    return next((one for one in there if End(Path(one.path)).round), None)


class Made:
    """What an outer step makes, tensor by tensor, as it is written. ``began``: the weights with
    which the round began, where those are not the ones before.
    """

    def __init__(
        self, before: PartReader, began: PartReader | None, ends: list[End], outer: Nesterov | None
    ) -> None:
        self._before, self._began, self._ends, self._outer = before, began, ends, outer
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
        mean = _mean(end.whole(name) for end in self._ends)
        if self._outer is None and self._began is None:
            return mean
        before = self._before.whole(name).to(mean.dtype)
        gradient = (before if self._began is None else self._began.whole(name)) - mean
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
