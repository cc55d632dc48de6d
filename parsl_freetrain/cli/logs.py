"""``freetrain logs``: what a trainer's ranks have printed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from parsl_freetrain.cli.logfiles import LogFile, Tail, lines_of, logs_in
from parsl_freetrain.cli.where import JsonOption, LedgerOption, ledger_at, trainer_named
from parsl_freetrain.core.errors import BadInput

FOLLOW_S = 0.5
"""Seconds between two looks at files that grow."""


def logs(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer.')],
    fragment: Annotated[Optional[int], typer.Option(metavar='N', help='Of this fragment. Default: the last that has one.')] = None,  # noqa: UP045
    rank: Annotated[Optional[int], typer.Option(metavar='N', help='Of this rank. Default: all.')] = None,  # noqa: UP045
    tail: Annotated[Optional[int], typer.Option(metavar='N', help='Only the last so many lines.')] = None,  # noqa: UP045
    follow: Annotated[bool, typer.Option('--follow', '-f', help='Go on until it is over, with later fragments too.')] = False,
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the ranks of a fragment have printed, errors with their tracebacks included."""
    from parsl_freetrain.ledger.reader import Reader  # the help is there without it

    if tail is not None and tail < 0:
        raise BadInput(f'--tail is {tail}; it must be a number of lines, 0 or more.')
    if follow and as_json:
        raise BadInput('--follow and --json exclude each other; give one of them.')
    path = ledger_at(ledger)
    with Reader(path) as reader:
        folder = _folder(reader, path, trainer)
        chosen = _chosen(folder, trainer, fragment, rank, required=not follow)
        if as_json:
            print(json.dumps([{'fragment': file.fragment, 'rank': file.rank, 'path': str(file.path),
                               'text': '\n'.join(lines_of(file.path, tail))} for file in chosen]))
        elif not follow:
            for file in chosen:
                if len(chosen) > 1:
                    print(f'==> fragment {file.fragment}, rank {file.rank}: {file.path}')
                for line in lines_of(file.path, tail):
                    print(line)
        else:
            try:
                _follow(lambda: _chosen(folder, trainer, fragment, rank, required=False), lambda: _over(reader, trainer), tail)
            except KeyboardInterrupt:
                pass


def _folder(reader: Any, ledger: Path, trainer: str) -> Path:
    story = reader.story()
    trainer_named(dict.fromkeys(row.name for row in reversed(story.trainers)), trainer)
    kept = reader.about(story.runs[-1]).get('checkpoint_dir')
    places = [Path(place) / trainer / 'logs' for place in ([kept] if kept else []) + [ledger.parent]]
    return next((place for place in places if place.is_dir()), places[0])


def _chosen(folder: Path, trainer: str, fragment: int | None, rank: int | None, required: bool) -> list[LogFile]:
    found = logs_in(folder)
    if not found and required:
        raise BadInput(f'Trainer {trainer!r} has no logs in {folder} yet; it has had no fragment there.')
    if found and fragment is None:
        fragment = found[-1].fragment
    chosen = [file for file in found if file.fragment == fragment and rank in (None, file.rank)]
    if not chosen and required:
        numbers = sorted({file.fragment for file in found})
        ranks = sorted({file.rank for file in found if file.fragment == fragment})
        if ranks:
            raise BadInput(f'Fragment {fragment} of trainer {trainer!r} has no rank {rank}; its ranks are {ranks[0]} to {ranks[-1]}.')
        raise BadInput(f'Trainer {trainer!r} has no log of a fragment {fragment}; there are logs of {numbers[0]} to {numbers[-1]}.')
    return chosen


def _over(reader: Any, trainer: str) -> bool:
    from parsl_freetrain.cli.liveness import life_of
    from parsl_freetrain.ledger.rows import FINAL_STATES

    story = reader.story()
    run = story.runs[-1]
    state = next((row.state for row in reversed(story.trainers) if row.name == trainer), '')
    return state in FINAL_STATES or life_of(story, run, reader.about(run), time.time()).state in ('ended', 'died')


def _follow(look: Callable[[], list[LogFile]], over: Callable[[], bool], tail: int | None) -> None:
    tails: dict[LogFile, Tail] = {}
    pause = threading.Event()
    first = True
    while True:
        last = over()   # asked first: what was printed before it was over is still shown
        for file in look():
            new = file not in tails
            reader = tails.setdefault(file, Tail(file.path))
            lines = reader.new(all_of_it=last)
            if new:
                print(f'==> fragment {file.fragment}, rank {file.rank}: {file.path}')
                if first and tail is not None:
                    lines = lines[len(lines) - min(tail, len(lines)):]
            for line in lines:
                print(f'[{file.rank}] {line}')
        print(end='', flush=True)
        first = False
        if last:
            return
        pause.wait(FOLLOW_S)
