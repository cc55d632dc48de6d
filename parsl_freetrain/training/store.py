"""Checkpoints that survive a kill of anything at any moment, and that a zombie of an earlier fragment cannot spoil."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.training.directories import directories, fragments_in, fresh, key, move_into, names, remove
from parsl_freetrain.training.durable import make_private_dir, sync_dir, write_new
from parsl_freetrain.training.identity import (
    FENCES,
    JSON,
    is_trainer_folder,
    move_aside,
    prove_writable,
    record_or_compare,
    refuse_open,
)
from parsl_freetrain.training.manifest import (
    Damaged,
    Manifest,
    commit,
    is_committed,
    read_manifest,
    verify,
    write_manifest,
)
from parsl_freetrain.training.retention import Retention

log = logging.getLogger(__name__)

RESUME = ('auto', 'require', 'never')
_BAD = 'bad'


class Fenced(FreeTrainError):
    """A later fragment of the trainer has begun, so this one must not commit any more."""


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint: where it is kept now, and what was wrong with it."""

    path: str
    reason: str


class CheckpointStore(Protocol):
    """Where the states of one trainer are kept."""

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The damaged checkpoints that this object came across, in that order."""
        ...

    def fence(self, fragment: int) -> None:
        """From now on, fragments with a smaller number cannot commit."""
        ...

    def save(
        self, write: Callable[[Path], None], *, samples: int, fragment: int, metrics: Mapping[str, float],
    ) -> Checkpoint:
        """Commit what ``write`` puts into the empty directory that it is given; raises :class:`Fenced`."""
        ...

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint, verified to the last byte; damaged ones are set aside on the way."""
        ...

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The committed checkpoints, oldest first; their data are not read."""
        ...

    def prune(self, keep: Retention) -> None:
        """Remove what need not be kept, once the newest has been verified."""
        ...

    def last_fragment(self) -> int:
        """The largest fragment number ever seen here, 0 if none, so that numbers never repeat."""
        ...


class PosixCheckpointStore:
    """Checkpoints as directories of a file system that all nodes of the trainer see.

    Parameters
    ----------
    folder
        The trainer's own folder; made (0700) by the first write.
    trainer
        The trainer's name.
    hook
        Called with 'begin', 'written', 'manifest', 'before-commit' and 'committed' while a checkpoint is saved, after
        each of these steps; for fault tests.

    Notes
    -----
    A checkpoint is ``ckpt-<samples>-f<fragment>``, always a fresh directory. Needed of the file system: making a
    directory and creating a file exclusively are atomic; fsync makes durable; and who opens a directory or file after
    that sees it (close-to-open, as NFS has it). Neither locks nor renaming over something that exists are used, so
    NFS from version 3, Lustre and GPFS will do.

    A fence is a file. A zombie that looks for fences just before one is made can still commit, between its look and
    its marker; what it commits is whole, in a directory of its own, and a true state of this trainer at its sample
    count, so no harm is done.

    Checkpoints are ordered by samples, then by fragment.
    """

    def __init__(self, folder: Path, trainer: str, *, hook: Callable[[str], None] | None = None) -> None:
        self.folder = Path(folder)
        self.trainer = trainer
        self._hook = hook if hook is not None else _no_hook
        self._set_aside: list[SetAside] = []

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """The damaged checkpoints that this object came across, in that order; all ever are in ``folder/bad``."""
        return tuple(self._set_aside)

    def fence(self, fragment: int) -> None:
        """From now on, fragments with a smaller number than ``fragment`` cannot commit; may be repeated."""
        fences = self.folder / FENCES
        make_private_dir(self.folder)
        make_private_dir(fences)
        try:
            write_new(fences / f'{fragment:06d}', b'')
        except FileExistsError:
            return
        sync_dir(fences)

    def save(
        self, write: Callable[[Path], None], *, samples: int, fragment: int, metrics: Mapping[str, float],
    ) -> Checkpoint:
        """Commit what ``write`` puts into the empty directory that it is given.

        Parameters
        ----------
        write
            Writes plain files, in sub-directories if it likes; returns when they are closed.
        samples
            Training samples that the state has seen.
        fragment
            The number of the fragment that saves.
        metrics
            Kept with the checkpoint.

        Raises
        ------
        Fenced
            If a later fragment has begun; nothing is committed then.
        BadInput
            If ``write`` left something that is not a plain file, or used a name of the store.
        """
        self._check_fence(fragment)
        make_private_dir(self.folder)
        folder = fresh(self.folder, samples, fragment)
        try:
            self._hook('begin')
            write(folder)
            self._hook('written')
            manifest = write_manifest(folder, trainer=self.trainer, samples=samples, fragment=fragment, metrics=metrics)
            sync_dir(self.folder)
            self._hook('manifest')
            self._hook('before-commit')
            self._check_fence(fragment)
            commit(folder)
        except BaseException as error:
            # Ours alone and not committed: a full disk must not stay full of it.
            remove(folder)
            if isinstance(error, OSError):
                self._check_fence(fragment)  # a later fragment has cleared the directory away under our hands
            raise
        self._hook('committed')
        return manifest.checkpoint(folder)

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint, verified to the last byte, or None.

        Damaged ones are moved to ``folder/bad``, kept there with a ``reason.txt``, and listed in :attr:`set_aside`.

        Raises
        ------
        BadInput
            If other users may write to the folder, or the checkpoint is of a later format.
        OSError
            If the file system does not answer; that never sets a checkpoint aside.
        """
        refuse_open(self.folder)
        seen: set[Path] = set()
        while left := [path for path in self._committed() if path not in seen]:
            newest = left[-1]
            seen.add(newest)
            try:
                return self._whole(newest).checkpoint(newest)
            except Damaged as damage:
                # No marker any more: another process has pruned it or set it aside meanwhile.
                if is_committed(newest):
                    self._put_aside(newest, str(damage))
        return None

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The committed checkpoints, oldest first; their data are not read."""
        found = []
        for path in self._committed():
            try:
                found.append(read_manifest(path).checkpoint(path))
            except Damaged:
                continue  # latest() sets it aside when it is its turn
        return tuple(found)

    def prune(self, keep: Retention) -> None:
        """Remove what ``keep`` does not keep, once the newest has been re-read and verified.

        What earlier fragments left half-written goes too. A directory that cannot be removed is logged and left.
        """
        newest = self.latest()
        if newest is None:
            return
        committed = self._committed()
        kept = keep.kept(self.checkpoints()) | {newest.path}
        # After a zombie has committed, the newest fragment's last state may not be among the newest by samples.
        current = max(committed, key=lambda path: (key(path)[1], key(path)), default=None)
        leftovers = [path for path in directories(self.folder)
                     if key(path)[1] < newest.fragment and not is_committed(path)]
        for path in [*(path for path in committed if path != current and str(path) not in kept), *leftovers]:
            remove(path)

    def last_fragment(self) -> int:
        """The largest number of any fragment that was fenced or began a checkpoint here, 0 if none."""
        return max(self._last_fence(), *fragments_in(self.folder), *fragments_in(self.folder / _BAD), 0)

    def _whole(self, path: Path) -> Manifest:
        manifest = verify(path)
        if manifest.trainer != self.trainer:
            raise Damaged(f'it is of trainer {manifest.trainer!r}')
        if (manifest.samples, manifest.fragment) != key(path)[:2]:
            raise Damaged(
                f'it is of {manifest.samples} samples and fragment {manifest.fragment}, its name says otherwise')
        return manifest

    def _check_fence(self, fragment: int) -> None:
        last = self._last_fence()
        if last > fragment:
            raise Fenced(f'Fragment {fragment} of trainer {self.trainer!r} cannot commit to {self.folder}: '
                         f'fragment {last} has begun.')

    def _last_fence(self) -> int:
        return max((int(name) for name in names(self.folder / FENCES) if name.isdecimal()), default=0)

    def _committed(self) -> list[Path]:
        while True:
            # Looked at oldest first, so that one pruned meanwhile is followed by the newer one that it was pruned for,
            # which is either in this list or makes the next one differ.
            listed = directories(self.folder)
            committed = [path for path in listed if is_committed(path)]
            if committed or directories(self.folder) == listed:
                return committed

    def _put_aside(self, path: Path, reason: str) -> None:
        bad = self.folder / _BAD
        try:
            make_private_dir(bad)
            target = move_into(path, bad)
            if target is None:
                return  # another process was faster
            sync_dir(bad)
            sync_dir(self.folder)
            write_new(target / 'reason.txt', f'{reason}\n'.encode())
        except OSError as error:
            # It is left where it is; what matters is that it is not used.
            log.warning('Damaged checkpoint %s could not be set aside: %s', path, error)
            target = path
        self._set_aside.append(SetAside(str(target), reason))
        log.warning('Checkpoint %s is damaged (%s); kept as %s, the one before is used', path, reason, target)


def claim(folder: Path, trainer: str, identity: Mapping[str, JSON], resume: str) -> Checkpoint | None:
    """Make sure, before anything is submitted, that a trainer may use a folder, and give the state to go on from.

    Parameters
    ----------
    folder
        The trainer's own folder; made (0700) with its parents where it does not exist.
    trainer
        The trainer's name.
    identity
        What must be the same for the old state to be of use (for instance seed and batch size).
    resume
        'auto': the newest good checkpoint, or None; 'require': there must be one; 'never': what is there is moved
        to ``old-<n>`` in the folder and training starts anew. Fragment numbers go on in any case, so that no zombie of
        the earlier run can commit.

    Raises
    ------
    BadInput
        If ``resume`` is none of these, or the folder cannot be used: another trainer's, another user's, not
        writable, not a trainer's but with things in it, or without a usable checkpoint where one is required.
    """
    if resume not in RESUME:
        raise BadInput(f'Trainer {trainer!r}: resume is {resume!r}; it must be one of {", ".join(map(repr, RESUME))}.')
    if resume == 'require' and not folder.is_dir():
        raise BadInput(f"Trainer {trainer!r}: resume is 'require', but there is no folder {folder}: name the one that "
                       f"it trained in, or use resume='auto'.")
    prove_writable(folder, trainer)
    store = PosixCheckpointStore(folder, trainer)
    if resume == 'never' and is_trainer_folder(folder):
        if last := store.last_fragment():
            store.fence(last + 1)
        move_aside(folder)
    record_or_compare(folder, trainer, identity)
    found = store.latest()
    if found is None and resume == 'require':
        raise BadInput(f"Trainer {trainer!r}: resume is 'require', but {folder} holds no usable checkpoint "
                       f"({len(store.set_aside)} damaged ones are kept in its folder {_BAD!r}): "
                       f"use resume='auto' to start from the beginning.")
    return found


def _no_hook(step: str) -> None:
    pass
