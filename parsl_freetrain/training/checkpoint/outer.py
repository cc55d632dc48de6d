"""The weights with which a round of pieces begins, and the outer step that makes the next ones.

They are in a folder of their own, a checkpoint for each round, made by whoever needs it first from
what all replicas have committed at the end of the round. It consists of single operations of IEEE
arithmetic on the CPU, in the order of the replicas: two who make it at once write the same bytes,
and the first who has them is who made it. Tensors are read and written one by one, so that memory
is needed for a few only. Each state of a replica names the digest of the weights with which its
round began, so that no outer step takes states of another training, or of an earlier one.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import sync_dir
from parsl_freetrain.training.checkpoint import directories as dirs
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.block_digests import digest, digest_of_blocks, write_hashed
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.identity import refuse_open
from parsl_freetrain.training.checkpoint.manifest import SHARED, Damaged, is_committed
from parsl_freetrain.training.checkpoint.optimizer_state import every_parameter
from parsl_freetrain.training.checkpoint.part_reader import PartReader
from parsl_freetrain.training.checkpoint.parts import Blocks, Chunk, Contents, Entry, write_contents
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, bytes_of, layout_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import OwnParameters, Prepared
from parsl_freetrain.training.checkpoint.transport import Disk
from parsl_freetrain.training.spec.diloco import MADE_BY, OUTER, ROUND_SAMPLES, Nesterov
from parsl_freetrain.training.spec.retention import BEST

T = TypeVar('T')
_FILE, _MOMENTUM, _KINDS = 'outer.safetensors', 'momentum ', ('model', 'ema', 'own')
_FROM = 1  # the number of a fragment that they have in their names
_ALIKE, _METRICS = 'alike', 'metrics'
SKIPPED = 'skipped_steps'
"""The metric that is a count: its sum over the replicas is what the training's result shows."""
Weights = Mapping[str, str]
"""All names of the trained parameters, each with the first name of the same one (tied ones)."""


class EndDamaged(FreeTrainError):
    """A replica's state at the end of a round, in ``path``, is not what was committed."""

    def __init__(self, path: Path, damage: Damaged) -> None:
        super().__init__(str(damage))
        self.path = path


class OuterWeights:
    """Those under ``root``, for one replica; ``fence`` raises Fenced if it must not commit.
    ``exact``: two who make them must have the same bytes.
    """

    def __init__(
        self,
        root: Path,
        training: str,
        replica: int,
        fence: Callable[[], None] = lambda: None,
        *,
        exact: bool = True,
    ) -> None:
        def hook(stage: str) -> None:
            if stage != 'committed':
                saving(f'outer-{stage}')
            if stage == 'before-commit':
                fence()

        self._replica, self._exact = replica, exact
        self._store = PosixCheckpointStore(root / OUTER, training)
        self._drafts = PosixCheckpointStore(root / OUTER / 'drafts', training, hook=hook)

    def find(self, samples: int) -> Path | None:
        """Those after the round that ends at a number of samples; None: they are not there yet."""
        for path in dirs.directories(self._store.folder):
            if dirs.key(path)[0] == samples and is_committed(path):
                refuse_open(self._store.folder)
                try:
                    Contents.read(path)
                    return path
                except Damaged as damage:
                    self.put_aside(path, damage)
        return None

    def put_aside(self, path: Path, damage: Damaged) -> None:
        self._store.put_aside(path, str(damage))

    def check(self, samples: int, begun: str) -> None:
        """Raises FreeTrainError if a replica has begun a round with others, of another digest."""
        if (path := self.find(samples)) and digest_of(path) != begun:
            raise _others(self._replica, path)

    def begin(self, prepared: Prepared) -> str:
        """Keep what the first round begins with; returns its digest. BadInput if another replica
        begins otherwise; FreeTrainError if they have ended rounds, and this one has lost its state.
        """
        weights, tensors = weights_of(prepared), _tensors_of(prepared)
        once = _once(tensors, weights)
        alike = {name: digest(bytes_of(tensors[name].detach().cpu().contiguous())) for name in once}
        if (there := self.find(0)) is None:
            if later := [p for p in dirs.directories(self._store.folder) if is_committed(p)]:
                raise FreeTrainError(
                    f'Replica {self._replica} has no checkpoint any more, and the others have '
                    f'ended rounds ({later[-1]}): put its folder back, or start anew '
                    "(resume='never')."
                )

            def value(name: str) -> torch.Tensor:
                return tensors[name].detach().cpu().to(_precise(tensors[name].dtype))

            made = [(name, tensors[name]) for name in once if name in weights]
            pieces = [
                Piece(n, _precise(t.dtype), tuple(t.shape), partial(value, n)) for n, t in made
            ]
            there = self._commit(pieces, 0, 0, {_ALIKE: alike})
        known = _reader(there).structure()[_ALIKE]
        for name in {**alike, **known}:
            if known.get(name) != alike.get(name):
                raise BadInput(
                    f'Replica {self._replica} begins with another {name!r} than one before it: '
                    'let initial weights be the same in every call of the function, drawn from '
                    'torch, random or numpy, which are seeded, or read from a file.'
                )
        return digest_of(there)

    def step(
        self, ends: Sequence[Checkpoint], samples: int, outer: Nesterov | None, length: int
    ) -> None:
        """Make those after a round from all replicas' states at its end, in order; or EndDamaged.
        FreeTrainError if that is not possible any more.
        """
        before = self.find(samples - length)
        gone = (
            f'The weights with which the round after {samples - length} samples began are not in '
            f'{self._store.folder}, or damaged: put them back, or start anew in another folder.'
        )
        if before is None:
            raise FreeTrainError(gone)
        states = [_End(Path(end.path)) for end in ends]
        if any(state.round != samples // length for state in states):
            return  # a replica has gone on with them
        begun = digest_of(before)
        for number, state in enumerate(states):
            if state.begun != begun:
                raise _others(number, before)
        pieces = _Made(_reader(before), states, outer).pieces()
        try:
            self._commit(pieces, samples, length, {_METRICS: _of_all(ends)})
        except Damaged as damage:
            raise FreeTrainError(gone) from damage
        for old in dirs.directories(self._store.folder):
            if dirs.key(old)[0] < samples - length:
                dirs.remove(old)

    def _commit(
        self, pieces: Sequence[Piece], samples: int, length: int, also: Mapping[str, Any]
    ) -> Path:
        """Where they are. Of several who make them the first one's count."""

        def write(folder: Path) -> Blocks:
            layout = layout_of(pieces)
            blocks = write_hashed(folder / _FILE, layout.content())
            places = {name: (_FILE, *place) for name, place in layout.places.items()}
            entries = {}
            for p in pieces:
                chunk = Chunk((0,) * len(p.shape), p.shape, places[p.name])
                entries[p.name] = Entry(str(p.dtype).removeprefix('torch.'), p.shape, (chunk,))
            torch.save(also, rest := io.BytesIO())
            files = {_FILE: (layout.nbytes, blocks)}
            return write_contents(folder, [Contents(entries, files, rest.getvalue())])

        for old in dirs.directories(self._drafts.folder):  # of those who were killed
            if dirs.key(old)[0] < samples:
                dirs.remove(old)
        how = {ROUND_SAMPLES: float(length), MADE_BY: float(self._replica)}
        saved = self._drafts.save(write, samples=samples, fragment=_FROM, metrics=how)
        draft = Path(saved.path)
        target = self._store.folder / dirs.name_of(samples, _FROM)
        try:
            draft.rename(target)
            sync_dir(target.parent)
            saving('outer-committed')
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            own, theirs = digest_of(draft), digest_of(target)
            dirs.remove(draft)
            if self._exact and samples and own != theirs:
                raise FreeTrainError(
                    f'The weights after {samples} samples in {target}, and those made here, '
                    'differ: what the nodes compute is not the same.'
                ) from None
        return target


def with_weights(saved: st.Saved, path: Path) -> tuple[st.Saved, dict[str, float]]:
    """A replica's state at a round's end, after the outer step; metrics are means over all."""
    reader = _reader(path)
    changed = replace(
        saved,
        models=[dict(one) for one in saved.models],
        averages=[dict(one) for one in saved.averages],
        own=[dict(one) for one in saved.own],
    )
    things = dict(_named(changed.models, changed.averages, changed.own))
    names: dict[str, list[str]] = {}
    for name, first in saved.position.weights.items():
        names.setdefault(first, []).append(name)
    for first in reader.shapes():
        if not first.startswith(_MOMENTUM):
            value = reader.whole(first)
            for name in names.get(first, [first]):
                thing, _, key = name.partition('.')
                things[thing][key] = torch.empty_like(things[thing][key]).copy_(value)
    return changed, reader.structure()[_METRICS]


def digest_of(path: Path) -> str:
    """The digest of the weights in a folder of them. Raises Damaged."""
    return digest_of_blocks(Contents.read(path).files[_FILE][1])


def _others(replica: int, path: Path) -> FreeTrainError:
    return FreeTrainError(
        f'Replica {replica} has trained from other weights than those in {path}, so their folders '
        "do not belong together: put back those of one time, or start anew (resume='never')."
    )


def _of_all(ends: Sequence[Checkpoint]) -> dict[str, float]:
    """What all replicas have reported last: means, since each has an equal part of each batch."""
    every = [end.metrics for end in ends]
    names = [name for name in every[0] if all(name in one for one in every) and name != BEST]
    found = {name: sum(one[name] for one in every) / len(every) for name in names}
    return found | {SKIPPED: sum(one.get(SKIPPED, 0.0) for one in every)}


def weights_of(prepared: Prepared) -> Weights:
    """Raises BadInput if a parameter that an optimizer trains is in no state of a model."""
    trained = {id(p) for one in prepared.optimizers for p in every_parameter(one)}
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _tensors_of(prepared).items():
        if id(tensor) in trained:
            found[name] = first.setdefault(id(tensor), name)
    if trained - first.keys():
        raise BadInput(
            'An optimizer of ctx.prepare trains a parameter that is in the state_dict() of no '
            'model, so replicas cannot share it: register it in a module.'
        )
    return found


def _tensors_of(prepared: Prepared) -> dict[str, torch.Tensor]:
    """What models and their averages hold in floating point numbers, by name in a state."""
    found: dict[str, Any] = {}
    for name, thing in _named(prepared.models, prepared.averages, prepared.own):
        own = isinstance(thing, OwnParameters)
        state = thing.tensors if own else thing.state_dict(keep_vars=True)
        found.update((f'{name}.{key}', one) for key, one in state.items())
    return {n: t for n, t in found.items() if isinstance(t, torch.Tensor) and _is_real(t.dtype)}


def _named(*several: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """What takes part, by name in a state: models, averages of models, parameters of none."""
    for kind, things in zip(_KINDS, several, strict=True):
        yield from zip(st.names_of(kind), things, strict=False)


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _End:
    def __init__(self, path: Path) -> None:
        self._path = path
        contents = self._guarded(lambda: Contents.read(path))
        reader = self._reader = PartReader(contents, Disk(path, contents.files))
        position = st.Position(**reader.structure()['rest']['position'])
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
            for name in _once(shapes, self.weights)
            if name.partition('.')[0].partition('_')[0] in _KINDS
            and _is_real(dtype := reader.dtype(name))
        }

    def whole(self, name: str) -> torch.Tensor:
        return self._guarded(lambda: self._reader.whole(name))

    def _guarded(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Damaged as damage:
            raise EndDamaged(self._path, damage) from damage


class _Made:
    """What an outer step makes, tensor by tensor, as it is written."""

    def __init__(self, before: PartReader, ends: list[_End], outer: Nesterov | None) -> None:
        self._before, self._ends, self._outer = before, ends, outer
        self._had_momentum = before.shapes(_MOMENTUM)
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
            dtype = _precise(dtype)
            found.append(Piece(name, dtype, shape, partial(self._weight, name)))
            if self._outer is not None:  # written next, since it has the same type
                get = partial(self._momentum.pop, name)
                found.append(Piece(_MOMENTUM + name, dtype, shape, get))
        return found

    def _weight(self, name: str) -> torch.Tensor:
        mean = _mean(end.whole(name) for end in self._ends)
        if self._outer is None:
            return mean
        before = self._before.whole(name).to(mean.dtype)
        gradient = before - mean
        momentum = gradient
        if _MOMENTUM + name in self._had_momentum:
            momentum = self._before.whole(_MOMENTUM + name) * self._outer.momentum + gradient
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
    total = total.to(_precise(total.dtype))
    for one in each:
        total, count = total + one.to(total.dtype), count + 1
    return total / count


def _precise(dtype: torch.dtype) -> torch.dtype:
    """What outer steps compute in, and keep: float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


def _once(names: Iterable[str], weights: Weights) -> list[str]:
    """The names of different tensors."""
    return [name for name in names if weights.get(name, name) == name]


def _reader(path: Path) -> PartReader:
    contents = Contents.read(path)
    return PartReader(contents, Disk(path, contents.files))
