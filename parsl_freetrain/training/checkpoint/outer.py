"""The weights with which a round of pieces begins, and the outer step that makes the next ones.

They are in a folder of their own, a checkpoint for each round, made by whoever needs it first from
what all replicas have committed at the end of the round. It consists of single operations of IEEE
arithmetic on the CPU, in the order of the replicas: two who make it at once write the same bytes,
and the first who has them is who made it. Tensors are read and written one by one, so that memory
is needed for a few only. Each state of a replica names the digest of the weights with which its
round began, so that no outer step takes states of another training, or of an earlier one.
"""

import errno
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.host.files import sync_dir
from parsl_freetrain.training.checkpoint import directories as dirs
from parsl_freetrain.training.checkpoint import outer_means as means
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.block_digests import digest, digest_of_blocks, write_hashed
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.identity import refuse_open
from parsl_freetrain.training.checkpoint.manifest import Damaged, is_committed, read_manifest
from parsl_freetrain.training.checkpoint.optimizer_state import every_parameter
from parsl_freetrain.training.checkpoint.parts import Blocks, Contents, entries_of, write_contents
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, bytes_of, layout_of
from parsl_freetrain.training.checkpoint.source import PartReader
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import OwnParameters, Prepared
from parsl_freetrain.training.spec.diloco import MADE_BY, OUTER, ROUND_SAMPLES, Nesterov
from parsl_freetrain.training.spec.retention import BEST

_FILE = 'outer.safetensors'
_FROM = 1  # the number of a fragment that they have in their names
_ALIKE, _METRICS = 'alike', 'metrics'
SKIPPED = 'skipped_steps'  # a count among metrics: its sum over the replicas is shown


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
        different = means.once(tensors, weights)
        alike = {
            name: digest(bytes_of(tensors[name].detach().cpu().contiguous())) for name in different
        }
        if (there := self.find(0)) is None:
            made = filter(is_committed, dirs.directories(self._store.folder))
            if later := [p for p in made if dirs.key(p)[0]]:  # others may begin just now
                raise FreeTrainError(
                    f'Replica {self._replica} has no checkpoint any more, and the others have '
                    f'ended rounds ({later[-1]}): put its folder back, or start anew '
                    "(resume='never')."
                )

            def value(name: str) -> torch.Tensor:
                return tensors[name].detach().cpu().to(means.precise(tensors[name].dtype))

            first = [(name, tensors[name]) for name in different if name in weights]
            pieces = [
                Piece(n, means.precise(t.dtype), tuple(t.shape), partial(value, n))
                for n, t in first
            ]
            there = self._commit(pieces, 0, 0, {_ALIKE: alike})
        known = PartReader.of(there).structure()[_ALIKE]
        for name in {**alike, **known}:
            if known.get(name) != alike.get(name):
                raise BadInput(
                    f'Replica {self._replica} begins with another {name!r} than one before it: '
                    'let initial weights be the same in every call of the function, drawn from '
                    'torch, random or numpy, which are seeded, or read from a file.'
                )
        return digest_of(there)

    def step(
        self,
        ends: Sequence[means.End],
        samples: int,
        outer: Nesterov | None,
        length: int,
        begun_with: int | None = None,
        compress: str | None = None,
    ) -> None:
        """Make those after a round from all replicas' states at its end, in order; or EndDamaged.
        FreeTrainError if that is not possible any more. ``begun_with``: the samples after which
        those were made with which the round began; None: with the ones before.
        """
        at = samples - length if begun_with is None else begun_with
        before, began = self.find(samples - length), self.find(at)
        if before is None or began is None:
            raise self._gone(samples - length)
        begun = digest_of(began)
        for number, end in enumerate(ends):
            if end.begun != begun:
                raise _others(number, began)
        late = PartReader.of(began) if began != before else None
        pieces = means.Made(PartReader.of(before), late, ends, outer, compress).pieces()
        try:
            self._commit(pieces, samples, length, {_METRICS: _of_all(ends)})
        except Damaged as damage:
            raise self._gone(samples - length) from damage
        for old in dirs.directories(self._store.folder):
            if dirs.key(old)[0] < samples - length:
                dirs.remove(old)

    def reader(self, samples: int) -> PartReader:
        """Of those of :meth:`find`, or FreeTrainError."""
        if (path := self.find(samples)) is None:
            raise self._gone(samples)
        return PartReader.of(path)

    def _gone(self, samples: int) -> FreeTrainError:
        return FreeTrainError(
            f'The weights with which the round after {samples} samples began are not in '
            f'{self._store.folder}, or damaged: put them back, or start anew in another folder.'
        )

    def _commit(
        self, pieces: Sequence[Piece], samples: int, length: int, also: Mapping[str, Any]
    ) -> Path:
        """Where they are. Of several who make them the first one's count."""

        def write(folder: Path) -> Blocks:
            layout = layout_of(pieces)
            blocks = write_hashed(folder / _FILE, layout.content())
            torch.save(also, rest := io.BytesIO())
            files = {_FILE: (layout.nbytes, blocks)}
            made = Contents(entries_of(layout, _FILE), files, rest.getvalue())
            return write_contents(folder, [made])

        for old in dirs.directories(self._drafts.folder):  # of those who were killed
            if dirs.key(old)[0] < samples - length:  # others may still make the ones before
                dirs.remove(old)
        how = {ROUND_SAMPLES: float(length), MADE_BY: float(self._replica)}
        draft = Path(self._drafts.save(write, samples=samples, fragment=_FROM, metrics=how).path)
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
    reader = PartReader.of(path)
    changed = replace(
        saved,
        models=[dict(one) for one in saved.models],
        averages=[dict(one) for one in saved.averages],
        own=[dict(one) for one in saved.own],
    )
    things = dict(means.named(changed.models, changed.averages, changed.own))
    names: dict[str, list[str]] = {}
    for name, first in saved.position.weights.items():
        names.setdefault(first, []).append(name)
    for first in reader.shapes():
        if not first.startswith(means.MOMENTUM):
            value = reader.whole(first)
            for name in names.get(first, [first]):
                thing, _, key = name.partition('.')
                things[thing][key] = torch.empty_like(things[thing][key]).copy_(value)
    return changed, reader.structure().get(_METRICS, {})


def made_by(path: Path) -> int:
    """The replica that has made weights."""
    return int(read_manifest(path).metrics[MADE_BY])


def digest_of(path: Path) -> str:
    """The digest of the weights in a folder of them. Raises Damaged."""
    return digest_of_blocks(Contents.read(path).files[_FILE][1])


def _others(replica: int, path: Path) -> FreeTrainError:
    return FreeTrainError(
        f'Replica {replica} has trained from other weights than those in {path}, so their folders '
        "do not belong together: put back those of one time, or start anew (resume='never')."
    )


def _of_all(ends: Sequence[means.End]) -> dict[str, float]:
    """What all replicas have reported last: means, since each has an equal part of each batch."""
    every = [end.metrics for end in ends]
    names = [name for name in every[0] if all(name in one for one in every) and name != BEST]
    found = {name: sum(one[name] for one in every) / len(every) for name in names}
    return found | {SKIPPED: sum(one.get(SKIPPED, 0.0) for one in every)}


def weights_of(prepared: Prepared) -> means.Weights:
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
    for name, thing in means.named(prepared.models, prepared.averages, prepared.own):
        own = isinstance(thing, OwnParameters)
        state = thing.tensors if own else thing.state_dict(keep_vars=True)
        found.update((f'{name}.{key}', one) for key, one in state.items())
    return {
        n: t for n, t in found.items() if isinstance(t, torch.Tensor) and means.is_real(t.dtype)
    }
