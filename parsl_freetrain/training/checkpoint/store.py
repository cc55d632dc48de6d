"""Checkpoints that survive any kill at any moment, and late processes of earlier fragments."""

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import make_dir, sync_dir, sync_file, write_new
from parsl_freetrain.training.checkpoint import directories as dirs
from parsl_freetrain.training.checkpoint import manifest as on_disk
from parsl_freetrain.training.checkpoint.identity import FENCES, refuse_open
from parsl_freetrain.training.spec.retention import Retention

log = logging.getLogger(__name__)

BAD = 'bad'
FENCES_KEPT = 10  # so that whoever lists them while one is made and one removed sees some


class Fenced(FreeTrainError):
    """A later fragment of the trainer has begun, so this one must not commit."""


@dataclass(frozen=True)
class SetAside:
    path: str
    reason: str


class PosixCheckpointStore:
    """Checkpoints of a trainer in its own ``folder`` (0700) of a file system that all its nodes
    see: each a new directory ``ckpt-<samples>-f<fragment>``. ``hook``, for tests: called with
    'begin', 'written', 'manifest', 'before-commit' and 'committed'. ``set_aside``: damaged ones
    that were found; ``folder/bad`` has all. The file system must make directories and exclusive
    files atomically, make data durable by fsync, and show them to whoever opens them afterwards
    (NFS from version 3, Lustre, GPFS). A fence is a file; a late process that commits just before
    one is made does no harm.
    """

    def __init__(
        self, folder: Path, trainer: str, *, hook: Callable[[str], None] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.trainer = trainer
        self._hook = hook or (lambda step: None)
        self.set_aside: list[SetAside] = []
        # The last checkpoint that this object has committed, and what it has hashed of it.
        self._written: tuple[Path | None, frozenset[str]] = None, frozenset()

    def fence(self, fragment: int) -> None:
        """Prevent fragments below ``fragment`` from committing. It may be repeated."""
        fences = self.folder / FENCES
        make_dir(self.folder)
        refuse_open(self.folder)
        if not fences.exists():  # the first one: nothing that the call has written was durable
            sync_file(self.folder / on_disk.TRAINER_FILE)
            sync_dir(self.folder.parent)
        try:
            make_dir(fences)
        except FileExistsError:
            raise BadInput(f'{fences} is no folder: remove it, and it is made anew.') from None
        try:
            write_new(fences / f'{fragment:06d}', b'')
        except FileExistsError:
            return
        sync_dir(fences)
        for name in dirs.names(fences):
            if name.isdecimal() and int(name) < fragment - FENCES_KEPT:
                (fences / name).unlink(missing_ok=True)

    def save(
        self,
        write: Callable[[Path], Mapping[str, tuple[str, ...]] | None],
        *,
        samples: int,
        fragment: int,
        metrics: Mapping[str, float],
        hand_in: Callable[[], str] = str,
    ) -> Checkpoint:
        """Commit what ``write`` writes into the empty directory that it is given: plain files,
        closed when it returns, perhaps with the digests of the blocks of those that are private and
        durable already. ``hand_in`` is called before the commit, which keeps what it returns.
        Raises Fenced if a later fragment has begun (nothing is committed), BadInput for other than
        plain files, or a reserved name.
        """
        self.check_fence(fragment)
        make_dir(self.folder)
        folder = dirs.fresh(self.folder, dirs.name_of(samples, fragment))
        try:
            self._hook('begin')
            hashed = write(folder)
            self._hook('written')
            values = {name: float(value) for name, value in metrics.items()}
            how = self.trainer, samples, fragment, values
            manifest = on_disk.Manifest(*how, handed_in=hand_in())
            manifest = on_disk.write_manifest(folder, manifest, hashed or {})
            sync_dir(self.folder)
            self._hook('manifest')
            self._hook('before-commit')
            self.check_fence(fragment)
            on_disk.commit(folder)
        except BaseException as error:
            # It is not committed and no other process uses it; a full disk must not stay full.
            dirs.remove(folder)
            if isinstance(error, OSError):
                # The error may be that a later fragment has removed the directory meanwhile.
                self.check_fence(fragment)
            raise
        self._written = folder, frozenset(hashed or ())
        self._hook('committed')
        return manifest.checkpoint(folder)

    def latest(self, *, shared: bool = True) -> Checkpoint | None:
        """The newest good checkpoint, all verified, or None; damaged ones go to ``folder/bad``.
        BadInput if others may write here, OSError if the file system does not answer.
        """
        return self._newest(partial(on_disk.verify, shared=shared))

    def newest(self) -> Checkpoint | None:
        """As :meth:`latest`, but the ranks verify the data, and call :meth:`put_aside`."""
        return self._newest(on_disk.read_manifest)

    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The committed checkpoints, oldest first. Their data are not read."""
        found = []
        for path in self._committed():
            try:
                found.append(on_disk.read_manifest(path).checkpoint(path))
            except on_disk.Damaged:
                continue  # latest() sets it aside when it is its turn
        return tuple(found)

    def handed_in(self) -> dict[int, str]:
        """What committed ends of rounds say of what was handed in, by samples."""
        return {one.samples: one.handed_in for one in self.checkpoints() if one.handed_in}

    def prune(
        self,
        keep: Retention,
        rounds: int = 0,
        last: int = 2,
        forget: Callable[[str], object] | None = None,
    ) -> None:
        """Remove what ``keep`` does not keep, after verifying the newest, and incomplete ones. The
        ends of the ``last`` rounds stay, each of ``rounds`` samples (0: there are none). ``forget``
        what was handed in with those that are removed.
        """
        newest = self.newest()
        if newest is not None and self._superfluous(keep, newest, rounds, last):
            own, hashed = self._written
            newest = self._newest(
                lambda path: on_disk.verify(
                    path, hashed=hashed if path == own else (), shared=False
                )
            )
        if newest is None:
            return
        earlier = [
            path for path in dirs.directories(self.folder) if dirs.key(path)[1] < newest.fragment
        ]
        leftovers = [path for path in earlier if not on_disk.is_committed(path)]
        told = {one.path: one.handed_in for one in self.checkpoints()}
        for path in [*self._superfluous(keep, newest, rounds, last), *leftovers]:
            if forget and told.get(str(path)):
                forget(told[str(path)])
            dirs.remove(path)
        self._remove_unused(newest.fragment)

    def _remove_unused(self, fragment: int) -> None:
        """Remove files of earlier fragments to which no checkpoint refers."""
        frozen = self.folder / on_disk.SHARED.removeprefix('../')
        numbers = {name: re.match(r'f(\d+)-', name) for name in dirs.names(frozen)}
        files = [name for name, found in numbers.items() if found and int(found[1]) < fragment]
        if not files:
            return
        bad = dirs.names(self.folder / BAD)
        used = set()
        for path in [*self._committed(), *(self.folder / BAD / name for name in bad)]:
            with suppress(on_disk.Damaged):
                used |= {file.name for file in on_disk.read_manifest(path).files}
        for name in files:
            if on_disk.SHARED + name not in used:
                (frozen / name).unlink(missing_ok=True)

    def _superfluous(
        self, keep: Retention, newest: Checkpoint, rounds: int, last: int
    ) -> list[Path]:
        committed = self._committed()
        ends: list[Path] = []
        if rounds:
            first = newest.samples // rounds * rounds - (last - 1) * rounds
            ends = [p for p in committed if (at := dirs.key(p)[0]) >= first and not at % rounds]
        kept = keep.kept(self.checkpoints()) | {newest.path}
        # The newest fragment's last state is kept, whatever a late process has committed.
        current = max(committed, key=lambda path: (dirs.key(path)[1], dirs.key(path)), default=None)
        kept |= {str(current), *map(str, ends)}
        return [path for path in committed if str(path) not in kept]

    def last_fragment(self) -> int:
        """The largest fragment that was fenced or began a checkpoint here, 0 if none."""
        begun = *dirs.fragments_in(self.folder), *dirs.fragments_in(self.folder / BAD)
        return max(self._last_fence(), *begun, 0)

    def put_aside(self, path: Path, reason: str) -> None:
        # Without a marker, another process has pruned it or set it aside meanwhile.
        if not on_disk.is_committed(path):
            return
        bad = self.folder / BAD
        try:
            make_dir(bad)
            target = dirs.move_into(path, bad)
            if target is None:
                return  # another process was faster
            sync_dir(bad)
            sync_dir(self.folder)
            write_new(target / 'reason.txt', f'{reason}\n'.encode())
        except OSError as error:
            # Leave it where it is; it only must not be used.
            log.warning('Damaged checkpoint %s could not be set aside: %s', path, error)
            target = path
        self.set_aside.append(SetAside(str(target), reason))
        kept = 'Checkpoint %s is damaged (%s); kept as %s, the one before is used'
        log.warning(kept, path, reason, target)

    def _newest(self, read: Callable[[Path], on_disk.Manifest]) -> Checkpoint | None:
        refuse_open(self.folder)
        seen: set[Path] = set()
        while left := [path for path in self._committed() if path not in seen]:
            newest = left[-1]
            seen.add(newest)
            try:
                return self._checked(newest, read(newest)).checkpoint(newest)
            except on_disk.SharedDamaged:
                raise
            except on_disk.Damaged as damage:
                self.put_aside(newest, str(damage))
        return None

    def _checked(self, path: Path, manifest: on_disk.Manifest) -> on_disk.Manifest:
        if manifest.trainer != self.trainer:
            raise on_disk.Damaged(f'it is of trainer {manifest.trainer!r}')
        if (manifest.samples, manifest.fragment) != dirs.key(path)[:2]:
            raise on_disk.Damaged(
                f'it is of {manifest.samples} samples and fragment {manifest.fragment}, '
                'its name says otherwise'
            )
        return manifest

    def check_fence(self, fragment: int) -> None:
        """Raises Fenced if a later fragment has begun."""
        last = self._last_fence()
        if last > fragment:
            raise Fenced(
                f'Fragment {fragment} of trainer {self.trainer!r} cannot commit to {self.folder}: '
                f'fragment {last} has begun.'
            )

    def _last_fence(self) -> int:
        fences = (int(name) for name in dirs.names(self.folder / FENCES) if name.isdecimal())
        return max(fences, default=0)

    def _committed(self) -> list[Path]:
        while True:
            # Oldest first: what replaces one that is pruned is in this list, or changes the next.
            listed = dirs.directories(self.folder)
            committed = [path for path in listed if on_disk.is_committed(path)]
            if committed or dirs.directories(self.folder) == listed:
                return committed
