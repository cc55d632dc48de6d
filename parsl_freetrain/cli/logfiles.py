"""The output of a trainer's ranks: which files there are, and their text as a terminal or a pipe can take it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r'fragment-(\d+)-rank-(\d+)\.log')
_ESCAPES = re.compile(r'\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])')


@dataclass(frozen=True, order=True)
class LogFile:
    """The output of one rank of one fragment."""

    fragment: int
    rank: int
    path: Path = field(compare=False)


def logs_in(folder: Path) -> list[LogFile]:
    """The logs in a trainer's folder of logs, by fragment and rank; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(LogFile(int(match[1]), int(match[2]), path)
                  for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def readable(line: str) -> str:
    """A line without control characters: of what a progress bar has overwritten, only what it shows in the end is left."""
    line = _ESCAPES.sub('', line).rstrip('\r').rpartition('\r')[2].expandtabs()
    return ''.join(c if c.isprintable() else '?' for c in line)


def lines_of(path: Path, last: int | None = None) -> list[str]:
    """All lines of a log, or the last few."""
    lines = path.read_text(errors='replace').split('\n')
    if lines and not lines[-1]:
        lines.pop()
    return [readable(line) for line in (lines if last is None else lines[len(lines) - min(last, len(lines)):])]


class Tail:
    """What is added to a log, line by line; a line counts when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self, all_of_it: bool = False) -> list[str]:
        """Lines that have come since the last call; with ``all_of_it`` also the last one that has no end yet."""
        try:
            with self._path.open('rb') as file:
                file.seek(self._at)
                fresh = file.read()
        except FileNotFoundError:
            return []
        whole = fresh if all_of_it else fresh[:fresh.rfind(b'\n') + 1]
        self._at += len(whole)
        text = whole.decode(errors='replace')
        return [readable(line) for line in text.removesuffix('\n').split('\n')] if text else []
