"""The reading side of a journal: from any process, while the run lives."""

import gc
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.fold import fold
from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.journal.records import Extent, check_head, scan


class EventBatch(NamedTuple):
    """Events that the controller got in one call, and its answer; ``seq`` counts from 1."""

    seq: int
    events: tuple[ev.Event, ...]
    decided: ev.Decided

    @property
    def at(self) -> float:
        return self.decided.at


class Journal:
    """A view of the journal, also while it is written; ``keep_progress``: all reports."""

    def __init__(self, path: str | os.PathLike[str], *, keep_progress: bool = True) -> None:
        self.path = Path(path)
        self._keep_progress = keep_progress
        self._history = History()
        self._file = (-1, -1)  # device and inode
        self._read_to = 0
        with self._open():
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def history(self, run: str | None = None) -> History:
        """The state of one run (or BadInput) or all: the same object, cheap if unchanged."""
        with self._open() as file:
            found = os.fstat(file.fileno())
            if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read_to:
                # It was begun anew, after damage.
                self._file, self._history = (found.st_dev, found.st_ino), History()
                self._read_to = file.tell()
            with _no_collection():
                for piece in scan(file, self._read_to):
                    self._take(piece)
                    self._read_to = piece.end
        return self._history.of(run)

    def _take(self, piece: Extent) -> None:
        try:
            if piece.content is not None:
                fold(self._history, piece.events(), self._keep_progress)
                return
            why = 'are damaged'
        except ValueError as error:
            why = f'are no events that this version knows ({error})'
        self._history.damage.append(
            f'The bytes {piece.start} to {piece.end} of the ledger {self.path} {why}; what is '
            'before and after them counts.'
        )

    def events(
        self, *kinds: type[ev.Event], run: RunState | None = None
    ) -> Iterator[tuple[int, ev.Event]]:
        """All events, or of some kinds or one run, with their run's number; reads the file."""
        number = 0
        with self._open() as file:
            for piece in scan(file, file.tell()):
                try:
                    events = [] if piece.content is None else piece.events()
                except ValueError:
                    continue
                for event in events:
                    if isinstance(event, ev.RunBegan):
                        number += 1
                    wanted = not kinds or isinstance(event, kinds)
                    if wanted and (run is None or run.id == number):
                        yield number, event

    def batches(self, run: RunState) -> Iterator[EventBatch]:
        seq, events = 0, list[ev.Event]()
        for _, event in self.events(run=run):
            if isinstance(event, ev.Decided):
                seq += 1
                yield EventBatch(seq, tuple(events), event)
                events.clear()
            elif not isinstance(event, ev.NOTES):
                events.append(event)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The file, at its first record."""
        try:
            # Opening a pipe that nobody writes to would wait for ever.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            raise BadInput(f'There is no ledger at {self.path}; name the file of a run.') from None
        except OSError as error:
            raise BadInput(
                f'The ledger {self.path} cannot be read ({error.strerror}); give a path that can.'
            ) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BadInput(f'{self.path} is not a regular file; name the file that a run writes.')
        with os.fdopen(fd, 'rb') as file:
            check_head(file, self.path)
            yield file


@contextmanager
def _no_collection() -> Iterator[None]:
    """What is read stays: to look for garbage in it again and again would take most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
