"""``freetrain logs``: shows the output of a trainer's ranks."""

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, flag, journal_at, value
from parsl_freetrain.core.model.errors import BadInput, clean
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.runs import life_of, trainer_named
from parsl_freetrain.training.spec.diloco import replica_folder

FOLLOW_S = 0.5  # seconds between two reads of growing files
_NAME = re.compile(r'fragment-(\d+)-rank-(\d+)\.log')
_ESCAPES = re.compile(r'\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])')


@dataclass(frozen=True, order=True)
class LogFile:
    fragment: int
    rank: int
    path: Path = field(compare=False)


def logs(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer.')],
    fragment: Annotated[
        int | None, value('N', 'The fragment. Default: the last one that has a log.')
    ] = None,
    rank: Annotated[int | None, value('N', 'The rank. Default: all.')] = None,
    tail: Annotated[int | None, value('N', 'Only the last N lines.')] = None,
    follow: Annotated[
        bool,
        flag(
            'Keep printing until the trainer is over, later fragments included.', '--follow', '-f'
        ),
    ] = False,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the ranks of a fragment have printed, errors with their tracebacks included."""
    if tail is not None and tail < 0:
        raise BadInput(f'--tail is {tail}; it must be a number of lines, 0 or more.')
    if follow and as_json:
        raise BadInput('--follow and --json exclude each other; give one of them.')
    journal = journal_at(ledger, keep_progress=False)
    folder = _folder(journal, trainer)
    chosen = _chosen(folder, trainer, fragment, rank, required=not follow)
    if as_json:
        texts = ('\n'.join(Tail(file.path).new(True, tail)) for file in chosen)
        found = [
            {'fragment': file.fragment, 'rank': file.rank, 'path': str(file.path), 'text': text}
            for file, text in zip(chosen, texts, strict=True)
        ]
        print(json.dumps(found))
    elif not follow:
        for file in chosen:
            if len(chosen) > 1:
                print(f'==> fragment {file.fragment}, rank {file.rank}: {readable(str(file.path))}')
            for line in Tail(file.path).new(True, tail):
                print(line)
    else:
        with suppress(KeyboardInterrupt):
            _follow(
                lambda: _chosen(folder, trainer, fragment, rank, required=False),
                lambda: _over(journal, trainer),
                tail,
            )


def _folder(journal: Journal, trainer: str) -> Path:
    runs = journal.history().runs
    trainer_named(dict.fromkeys(name for run in reversed(runs) for name in run.trainers), trainer)
    kept = runs[-1].began.checkpoint_dir
    folders = [*([Path(kept)] if kept else []), journal.path.parent]
    one = next(run.trainers[trainer] for run in reversed(runs) if trainer in run.trainers).trainer
    own = Path(trainer)
    if one.training not in ('', trainer):
        own = replica_folder(Path(one.training), int(trainer.rpartition('.replica')[2]))
    places = [folder / own / 'logs' for folder in folders]
    return next((place for place in places if place.is_dir()), places[0])


def _chosen(
    folder: Path, trainer: str, fragment: int | None, rank: int | None, required: bool
) -> list[LogFile]:
    found = logs_in(folder)
    if not found and required:
        raise BadInput(
            f'Trainer {trainer!r} has no logs in {folder} yet; it has had no fragment there.'
        )
    if found and fragment is None:
        fragment = found[-1].fragment
    chosen = [file for file in found if file.fragment == fragment and rank in (None, file.rank)]
    if not chosen and required:
        numbers = sorted({file.fragment for file in found})
        ranks = sorted({file.rank for file in found if file.fragment == fragment})
        what = f'rank {rank} in fragment {fragment}' if ranks else f'a fragment {fragment}'
        raise BadInput(
            f'Trainer {trainer!r} has no log of {what}; there are those of '
            f'{_listed(ranks or numbers)}.'
        )
    return chosen


def _listed(numbers: list[int]) -> str:
    return f'{numbers[0]} to {numbers[-1]}' if len(numbers) > 1 else f'{numbers[0]} only'


def _over(journal: Journal, trainer: str) -> bool:
    history = journal.history()
    mine = [run.trainers[trainer] for run in history.runs if trainer in run.trainers]
    life = life_of(history, history.runs[-1], time.time())
    return mine[-1].over or life.state in ('ended', 'died')


def _follow(look: Callable[[], list[LogFile]], over: Callable[[], bool], tail: int | None) -> None:
    tails: dict[LogFile, Tail] = {}
    pause = threading.Event()
    while True:
        last = over()  # asked first, so that everything printed before the end is still shown
        for file in look():
            new = file not in tails
            lines = tails.setdefault(file, Tail(file.path)).new(last, tail)
            if new:
                print(f'==> fragment {file.fragment}, rank {file.rank}: {readable(str(file.path))}')
            for line in lines:
                print(f'[{file.rank}] {line}')
        print(end='', flush=True)
        tail = None  # of what is added from now on, all is shown
        if last:
            return
        pause.wait(FOLLOW_S)


def logs_in(folder: Path) -> list[LogFile]:
    """The logs in a trainer's log folder, by fragment and rank; none if there is no such folder."""
    if not folder.is_dir():
        return []
    named = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    return sorted(LogFile(int(match[1]), int(match[2]), path) for path, match in named if match)


def readable(line: str) -> str:
    return clean(_ESCAPES.sub('', line).rstrip('\r').rpartition('\r')[2].expandtabs())


class Tail:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self, all_of_it: bool = False, newest: int | None = None) -> list[str]:
        """The lines added since the last call, or the ``newest`` of them; with ``all_of_it``, also
        an incomplete last line.
        """
        try:
            with self._path.open('rb') as file:
                file.seek(self._at)
                fresh = file.read()
        except FileNotFoundError:
            return []
        whole = fresh if all_of_it else fresh[: fresh.rfind(b'\n') + 1]
        self._at += len(whole)
        text = whole.decode(errors='replace')
        lines = text.removesuffix('\n').split('\n') if text else []
        if newest is not None:
            lines = lines[max(len(lines) - newest, 0) :]
        return [readable(line) for line in lines]
