"""The writing side of a journal."""

import contextlib
import errno
import logging
import os
import stat
import threading
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from msgspec import structs

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput, of_file
from parsl_freetrain.host import files
from parsl_freetrain.host.ownership import is_ours, refuse_foreign
from parsl_freetrain.journal.records import HEAD, NAME, check_head, is_remains, record, scan

log = logging.getLogger(__name__)

SYNC_S = 5.0  # maximum seconds until what was written is on disk, where others see it, too
ALIVE_S = 30.0  # seconds after which a run that has nothing to write notes that it is alive
MOST_HELD = 100_000  # number of events that wait at most for a file that cannot be written
FLEETING = (ev.Tick, ev.HolesSeen, ev.FragmentProgressed, ev.OrdinaryWork, ev.NodesNeeded)
"""Events without which reports lack only details."""


class JournalWriter:
    """The one writer of a journal, made private; BadInput if it cannot be written, later nothing
    ends or holds up the run. After kill -9 the file holds all up to the last :meth:`flush`, each of
    which writes whole rounds.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._pending: list[ev.Event] = []
        self._run: list[ev.Event] = []  # what a new file needs of this run
        self._begun_at_byte = 0  # where this run begins in the file
        self._written_at = self._synced_at = -ALIVE_S
        self._complained = False
        self._thin_at = MOST_HELD
        self._fd, self._size, self._names = _open(self.path)

    def begin_run(self, began: ev.RunBegan) -> None:
        """Start a run, written at once; BadInput if there is one of this name or it cannot be."""
        if began.name in self._names:
            raise BadInput(
                f'The ledger {self.path} has a run {began.name!r} already; each needs its own name.'
            )
        self._begun_at_byte = self._size
        self.take(began)
        self.flush()
        if self._pending:
            raise BadInput(f'The ledger {self.path} cannot be written; give a path that can.')

    def take(self, event: ev.Event) -> None:
        """Append an event to the run that was begun; of an end of the run, write it at once."""
        if isinstance(event, ev.OffersSeen) and not event.offers:
            if 0 <= event.at - self._written_at < ALIVE_S:
                return
        elif not isinstance(event, FLEETING):
            self._keep(event)
        self._written_at = event.at
        self._pending.append(event)
        if len(self._pending) > self._thin_at:
            self._thin()
        if isinstance(event, ev.RunEnded):
            self.close()

    def _keep(self, event: ev.Event) -> None:
        if isinstance(event, ev.Decided):
            if not any(isinstance(action, ev.EndTrainer) for action in event.actions):
                return
            event = structs.replace(event, problem=b'')
        self._run.append(event)

    def flush(self) -> None:
        """Write what is pending. A failure is logged once; a damaged file is set aside."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file; calling it again does nothing."""
        with self._lock:
            if self._fd < 0:
                return
            self._flush()
            if self._pending:
                log.warning('The ledger %s lacks its last events: it cannot be written.', self.path)
            self._pending.clear()
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        if not self._pending or self._fd < 0:
            return
        data = record(_encoded(self._pending, self.path))
        try:
            if why := self._damage():
                self._begin_anew(why)
            else:
                self._write(data)
        except (OSError, BadInput) as error:
            if not self._complained:
                log.warning(
                    f'The ledger {self.path} cannot be written now ({error}); its events are kept '
                    'in memory, and writing is tried again.'
                )
            self._complained = True
            return
        self._pending.clear()
        self._complained, self._thin_at = False, MOST_HELD
        if monotonic() - self._synced_at >= SYNC_S:
            self._synced_at = monotonic()
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)

    def _write(self, data: bytes) -> None:
        try:
            if (written := os.write(self._fd, data)) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def _damage(self) -> str:
        """Why the file is no longer the one that was written; empty: it is."""
        mine = os.fstat(self._fd)
        try:
            there = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return 'it is gone'
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            return 'another file has its name'
        if mine.st_size > self._size and self._complained:
            os.ftruncate(self._fd, self._size)  # the rest of what could not be written
        elif mine.st_size != self._size:
            return f'it has {mine.st_size} bytes and should have {self._size}'
        return ''

    def _begin_anew(self, why: str) -> None:
        """Put a new file in a damaged one's place, with what matters and can be read."""
        with os.fdopen(os.dup(self._fd), 'rb') as old:
            whole = [piece for piece in scan(old, len(HEAD)) if piece.end <= self._begun_at_byte]
            before = [record(piece.content) for piece in whole if piece.content is not None]
        begun_at = len(HEAD) + sum(map(len, before))
        content = b''.join([HEAD, *before, record(_encoded(self._run, self.path))])
        aside = _put_in_place_of(self.path, content)
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        self._size, self._begun_at_byte = len(content), begun_at
        now = 'gone' if aside is None else f'kept as {aside}'
        log.warning(
            f'The ledger {self.path} was damaged while it was written: {why}. It is {now}, and the '
            'run goes on with a new file of this name. Reports may lack something of the time '
            'before.'
        )

    def _thin(self) -> None:
        before = len(self._pending)
        self._pending = [event for event in self._pending if not isinstance(event, FLEETING)]
        self._thin_at = max(MOST_HELD, 2 * len(self._pending))
        log.warning(
            f'The ledger {self.path} could not be written for long. {before - len(self._pending)} '
            'events are left out, so reports will lack something of this time.'
        )


class _Remains(Exception):
    """A file is what remains of a journal."""


def _open(path: Path) -> tuple[int, int, set[str]]:
    """As :func:`_opened`. What remains of a damaged journal is set aside."""
    try:
        return _opened(path)
    except _Remains as remains:
        with files.open_regular(path) as old:
            readable = [record(p.content) for p in scan(old, 0) if p.content is not None]
        aside = _put_in_place_of(path, b''.join([HEAD, *readable]))
        log.warning(
            f'The ledger {path} {remains}; it is kept as {aside}. Reports may lack something of '
            'earlier runs.'
        )
        return _opened(path)


def _opened(path: Path) -> tuple[int, int, set[str]]:
    """A descriptor that appends, the size of the file, and the names of its runs."""
    with of_file(f'The ledger {path} cannot be written', 'give a path that can'):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # What can replace the file can change what is in it.
        refuse_foreign(path.parent, 'folder of the ledger')
        with contextlib.suppress(FileExistsError):
            files.write_new(path, HEAD)
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(
                f'{path} is not a regular file; name a ledger, or a file that does not exist yet.'
            )
        if not is_ours(found.st_uid, path.parent):
            raise BadInput(
                f'The ledger {path} belongs to another user (id {found.st_uid}); name one of yours.'
            )
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if found.st_mode & 0o077:
            os.fchmod(fd, files.PRIVATE)
        names, end = set[str](), len(HEAD)
        with os.fdopen(os.dup(fd), 'rb') as file:
            if found.st_size == 0:
                os.write(fd, HEAD)
            if is_remains(file, path.name == NAME):
                raise _Remains('has lost its beginning')
            check_head(file, path)
            for piece in scan(file, len(HEAD)):
                end = piece.end
                if piece.content is None:  # it may hide what follows
                    raise _Remains('has places that cannot be read')
                # Nearly all records have none: they need not be decoded.
                if b'RunBegan' in piece.content:
                    with contextlib.suppress(ValueError):
                        names |= {e.name for e in piece.events() if isinstance(e, ev.RunBegan)}
        os.ftruncate(fd, end)  # a record that its writer has not completed
    except BaseException:
        os.close(fd)
        raise
    return fd, end, names


def _put_in_place_of(path: Path, content: bytes) -> Path | None:
    """Put a new file in a damaged one's place; where that is kept. A kill leaves either."""
    draft = path.with_name(f'.{path.name}.part')
    draft.unlink(missing_ok=True)
    names = (path.with_name(f'{path.name}.damaged-{n}') for n in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        files.write_new(draft, content)
        with contextlib.suppress(FileNotFoundError):
            try:
                os.link(path, aside, follow_symlinks=False)
            except OSError:  # a folder, or a file system without links
                path.rename(aside)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return aside if os.path.lexists(aside) else None


def _plain(value: Any) -> object:
    return value.item()  # a number of numpy or torch


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _encoded(events: list[ev.Event], path: Path) -> bytes:
    try:
        return _encoder.encode(events)
    except (UnicodeError, OverflowError, TypeError, AttributeError):
        pass
    kept = []
    for event in events:
        try:
            # A lone surrogate, such as of a file's name in an error text, is no Unicode.
            plain = _clean(msgspec.to_builtins(event, builtin_types=(bytes,), enc_hook=_plain))
            _encoder.encode(plain)
            kept.append(plain)
        except (UnicodeError, OverflowError, TypeError, AttributeError) as error:
            log.warning('The ledger %s leaves out %.300r (%s)', path, event, error)
    return _encoder.encode(kept)


def _clean(value: Any) -> Any:
    match value:
        case str():
            return value.encode('utf-8', 'replace').decode()
        case dict():
            return {_clean(key): _clean(each) for key, each in value.items()}
        case list() | tuple():
            return [_clean(each) for each in value]
    return value
