"""``freetrain logs``: shows the output of a trainer's ranks."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.names import trainer_named

FOLLOW_S = 0.5
"""Seconds between two reads of growing files."""

_NAME = re.compile(r'fragment-(\d+)-rank-(\d+)\.log')
_ESCAPES = re.compile(r'\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])')


def logs(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer.')],
    fragment: Annotated[
        int | None,
        typer.Option(metavar='N', help='The fragment. Default: the last one that has a log.'),
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar='N', help='The rank. Default: all.')] = None,
    tail: Annotated[int | None, typer.Option(metavar='N', help='Only the last N lines.')] = None,
    follow: Annotated[
        bool,
        typer.Option(
            '--follow',
            '-f',
            help='Keep printing until the trainer is over, later fragments included.',
        ),
    ] = False,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the ranks of a fragment have printed, errors with their tracebacks included."""
    from parsl_freetrain.ledger.reader import Reader  # imported here, so that --help is fast

    if tail is not None and tail < 0:
        raise BadInput(f'--tail is {tail}; it must be a number of lines, 0 or more.')
    if follow and as_json:
        raise BadInput('--follow and --json exclude each other; give one of them.')
    path = ledger_at(ledger)
    with Reader(path) as reader:
        folder = _folder(reader, path, trainer)
        chosen = _chosen(folder, trainer, fragment, rank, required=not follow)
        if as_json:
            print(
                json.dumps(
                    [
                        {
                            'fragment': file.fragment,
                            'rank': file.rank,
                            'path': str(file.path),
                            'text': '\n'.join(lines_of(file.path, tail)),
                        }
                        for file in chosen
                    ]
                )
            )
        elif not follow:
            for file in chosen:
                if len(chosen) > 1:
                    print(f'==> fragment {file.fragment}, rank {file.rank}: {file.path}')
                for line in lines_of(file.path, tail):
                    print(line)
        else:
            try:
                _follow(
                    lambda: _chosen(folder, trainer, fragment, rank, required=False),
                    lambda: _over(reader, trainer),
                    tail,
                )
            except KeyboardInterrupt:
                pass


def _folder(reader: Any, ledger: Path, trainer: str) -> Path:
    history = reader.history()
    trainer_named(dict.fromkeys(row.name for row in reversed(history.trainers)), trainer)
    kept = reader.about(history.runs[-1]).get('checkpoint_dir')
    places = [
        Path(place) / trainer / 'logs' for place in ([kept] if kept else []) + [ledger.parent]
    ]
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
        if ranks:
            raise BadInput(
                f'Fragment {fragment} of trainer {trainer!r} has no rank {rank}; its '
                f'ranks are {ranks[0]} to {ranks[-1]}.'
            )
        raise BadInput(
            f'Trainer {trainer!r} has no log of a fragment {fragment}; there are logs of '
            f'{numbers[0]} to {numbers[-1]}.'
        )
    return chosen


def _over(reader: Any, trainer: str) -> bool:
    from parsl_freetrain.ledger.rows import FINAL_STATES
    from parsl_freetrain.report.life import life_of

    history = reader.history()
    run = history.runs[-1]
    state = next((row.state for row in reversed(history.trainers) if row.name == trainer), '')
    return state in FINAL_STATES or life_of(history, run, reader.about(run), time.time()).state in (
        'ended',
        'died',
    )


def _follow(look: Callable[[], list[LogFile]], over: Callable[[], bool], tail: int | None) -> None:
    tails: dict[LogFile, Tail] = {}
    pause = threading.Event()
    first = True
    while True:
        last = over()  # asked first, so that everything printed before the end is still shown
        for file in look():
            new = file not in tails
            reader = tails.setdefault(file, Tail(file.path))
            lines = reader.new(all_of_it=last)
            if new:
                print(f'==> fragment {file.fragment}, rank {file.rank}: {file.path}')
                if first and tail is not None:
                    lines = lines[len(lines) - min(tail, len(lines)) :]
            for line in lines:
                print(f'[{file.rank}] {line}')
        print(end='', flush=True)
        first = False
        if last:
            return
        pause.wait(FOLLOW_S)


@dataclass(frozen=True, order=True)
class LogFile:
    """The output of one rank of one fragment."""

    fragment: int
    rank: int
    path: Path = field(compare=False)


def logs_in(folder: Path) -> list[LogFile]:
    """The logs in a trainer's log folder, by fragment and rank; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(
        LogFile(int(match[1]), int(match[2]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    )


def readable(line: str) -> str:
    """A line without control characters. Of a progress bar, only its final state is left."""
    line = _ESCAPES.sub('', line).rstrip('\r').rpartition('\r')[2].expandtabs()
    return ''.join(c if c.isprintable() else '?' for c in line)


def lines_of(path: Path, last: int | None = None) -> list[str]:
    """All lines of a log, or the last ``last`` ones."""
    lines = path.read_text(errors='replace').split('\n')
    if lines and not lines[-1]:
        lines.pop()
    return [
        readable(line)
        for line in (lines if last is None else lines[len(lines) - min(last, len(lines)) :])
    ]


class Tail:
    """Reads new complete lines of a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self, all_of_it: bool = False) -> list[str]:
        """The lines added since the last call; with ``all_of_it``, also an incomplete last line."""
        try:
            with self._path.open('rb') as file:
                file.seek(self._at)
                fresh = file.read()
        except FileNotFoundError:
            return []
        whole = fresh if all_of_it else fresh[: fresh.rfind(b'\n') + 1]
        self._at += len(whole)
        text = whole.decode(errors='replace')
        return [readable(line) for line in text.removesuffix('\n').split('\n')] if text else []
