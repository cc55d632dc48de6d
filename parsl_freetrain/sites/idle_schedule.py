"""Schedules of idle nodes: CSV ``start_s,end_s,node``, and ``node_class`` if they are unequal."""

import csv
import gzip
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.host.files import read_zipped

COLUMNS = ('start_s', 'end_s', 'node')
CLASS = 'node_class'

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Names become parts of file names and of environment variables.
_NODE_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')
_CLASS_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_-]*')  # as the classes of batch sites
_RIGHT = 'a CSV file with the columns start_s,end_s,node'


@dataclass(frozen=True, order=True)
class IdleInterval:
    """A node is idle from ``start_s`` on and busy at ``end_s``, in the schedule's seconds."""

    start_s: float
    end_s: float
    node: str


class Schedule:
    """Idle intervals of named nodes, sorted by start, then by node.

    Touching intervals of one node are kept apart: the node is taken and given back in the same
    instant. Raises BadInput for an interval that starts before 0, ends before it starts or overlaps
    another one of its node; a node name that is not made of letters, digits, ``.``, ``_`` and
    ``-``; classes that are not one for each node.

    Parameters
    ----------
    intervals
        In any order; those of one node must not overlap.
    node_classes
        The class of each node, such as ``{'a': 'a100', 'b': 'cpu'}``; empty: nodes are alike.
    """

    def __init__(
        self, intervals: Iterable[IdleInterval], node_classes: Mapping[str, str] | None = None
    ) -> None:
        rows = list(intervals)
        names = [row.node for row in rows]
        starts = np.array([row.start_s for row in rows], dtype=np.float64)
        ends = np.array([row.end_s for row in rows], dtype=np.float64)
        _check(starts, ends, names, lambda row: f'interval {row + 1}')
        classes = dict(node_classes or {})
        if classes and sorted(classes) != sorted(set(names)):
            each = f'a dict with the class of each of {", ".join(sorted(set(names)))}'
            refuse('node_classes', classes, each)
        for node, node_class in classes.items():
            check_class(node_class, f'node {node}')
        self._build(starts, ends, names, classes)

    @classmethod
    def _from_columns(
        cls, starts: Floats, ends: Floats, names: Sequence[str], classes: Mapping[str, str]
    ) -> 'Schedule':
        schedule = cls.__new__(cls)
        schedule._build(starts, ends, names, classes)
        return schedule

    def _build(
        self, starts: Floats, ends: Floats, names: Sequence[str], classes: Mapping[str, str]
    ) -> None:
        self.nodes: tuple[str, ...] = tuple(sorted(set(names)))
        self.node_classes = {node: classes[node] for node in self.nodes if node in classes}
        index = {name: i for i, name in enumerate(self.nodes)}
        node = np.fromiter((index[name] for name in names), dtype=np.int64, count=len(names))
        order = np.lexsort((node, starts))
        self.starts: Floats = starts[order]
        self.ends: Floats = ends[order]
        self.node_index: Ints = node[order]
        for column in (self.starts, self.ends, self.node_index):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        count = f'{len(self)} idle intervals of {len(self.nodes)} nodes'
        return f'<Schedule: {count} until {self.end_s:g} s>'

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.intervals == other.intervals
            and self.node_classes == other.node_classes
        )

    @cached_property
    def intervals(self) -> tuple[IdleInterval, ...]:
        names = (self.nodes[node] for node in self.node_index.tolist())
        rows = zip(self.starts.tolist(), self.ends.tolist(), names, strict=True)
        return tuple(IdleInterval(*row) for row in rows)

    @property
    def end_s(self) -> float:
        """When the last interval ends, in seconds; 0 for an empty schedule."""
        return float(self.ends.max()) if len(self) else 0.0

    def only(self, nodes: Iterable[str]) -> 'Schedule':
        wanted = set(nodes)
        keep = np.isin(self.node_index, [i for i, name in enumerate(self.nodes) if name in wanted])
        names = [self.nodes[i] for i in self.node_index[keep].tolist()]
        return self._from_columns(self.starts[keep], self.ends[keep], names, self.node_classes)

    def scaled(self, time_factor: float) -> 'Schedule':
        """All times multiplied by ``time_factor``; BadInput unless it is above 0 and finite."""
        if not (math.isfinite(time_factor) and time_factor > 0):
            refuse('The time factor of a schedule', time_factor, 'a number above 0')
        names = [self.nodes[i] for i in self.node_index.tolist()]
        return self._from_columns(
            self.starts * time_factor, self.ends * time_factor, names, self.node_classes
        )


def read_schedule(path: str | Path) -> Schedule:
    """Read idle intervals from CSV with the columns ``start_s,end_s,node``, plain or gzipped.
    Raises BadInput, with file and line, if it cannot be read, or a line of it cannot be used.

    Parameters
    ----------
    path
        The file; times are seconds from the schedule's start. A fourth column, ``node_class``, may
        say of which class the line's node is.
    """
    path = Path(path)
    rows, lines = _rows(path)
    at = _column_order(path, rows)
    rows, lines = rows[1:], lines[1:]
    if not rows:
        raise BadInput(
            f'{path} has no idle interval; it needs at least one line start_s,end_s,node '
            'below its header.'
        )
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(at):
            raise BadInput(
                f'{path}, line {line}: {len(row)} columns where there must be {len(at)}: '
                f'{",".join(at)}.'
            )
    starts = _numbers(path, 'start_s', [row[at['start_s']] for row in rows], lines)
    ends = _numbers(path, 'end_s', [row[at['end_s']] for row in rows], lines)
    names = [row[at['node']].strip() for row in rows]
    _check(starts, ends, names, lambda row: f'{path}, line {lines[row]}')
    classes: dict[str, str] = {}
    for name, row, line in zip(names, rows, lines, strict=True) if CLASS in at else ():
        stated = row[at[CLASS]].strip()
        if classes.setdefault(name, stated) != stated:
            raise BadInput(
                f'{path}, line {line}: node {name} is of the class {stated!r}, but above of '
                f'{classes[name]!r}; a node has one class.'
            )
        check_class(stated, f'{path}, line {line}')
    return Schedule._from_columns(starts, ends, names, classes)


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write CSV that :func:`read_schedule` reads back equal; gzipped if it is named ``.gz``."""
    path = Path(path)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    classes = schedule.node_classes
    writer.writerow((*COLUMNS, CLASS) if classes else COLUMNS)
    for each in schedule.intervals:
        row = [_shortest(each.start_s), _shortest(each.end_s), each.node]
        writer.writerow([*row, classes[each.node]] if classes else row)
    data = text.getvalue().encode()
    # Without a time stamp, the same schedule gives the same bytes.
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith('.gz') else data)


def _shortest(seconds: float) -> str:
    return repr(int(seconds) if seconds.is_integer() else seconds)


def _rows(path: Path) -> tuple[list[list[str]], list[int]]:
    try:
        text = read_zipped(path, _RIGHT).decode('utf-8-sig')
    except UnicodeDecodeError:
        raise BadInput(f'{path} is not text; give {_RIGHT}.') from None
    reader = csv.reader(io.StringIO(text, newline=''))
    try:
        numbered = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        raise BadInput(
            f'{path}, line {reader.line_num}: not CSV ({error}); each line must be '
            'start_s,end_s,node.'
        ) from None
    return [row for row, _ in numbered], [line for _, line in numbered]


def _column_order(path: Path, rows: list[list[str]]) -> dict[str, int]:
    if not rows:
        raise BadInput(f'{path} is empty; its first line must be start_s,end_s,node.')
    header = [name.strip() for name in rows[0]]
    if sorted(set(header) | {CLASS}) != sorted((*COLUMNS, CLASS)) or len(set(header)) < len(header):
        raise BadInput(
            f'{path}, line 1: the columns are {",".join(header)[:99]!r}; they must be '
            f'start_s,end_s,node, and {CLASS} where nodes are of several classes.'
        )
    return {name: i for i, name in enumerate(header)}


def _numbers(path: Path, column: str, texts: list[str], lines: list[int]) -> Floats:
    numbers = np.array([_number_or_nan(text) for text in texts], dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        row = int(bad[0])
        refuse(f'{path}, line {lines[row]}: {column}', texts[row], 'a number of seconds')
    return numbers


def _number_or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_class(name: str, where: str) -> None:
    """Refuse what cannot be the name of a node class. Raises BadInput, beginning with ``where``."""
    if not _CLASS_NAME.fullmatch(name):
        refuse(f'{where}: the node class', name, 'made of letters, digits, "_" and "-"')


def _check(starts: Floats, ends: Floats, names: Sequence[str], where: Callable[[int], str]) -> None:
    for name in set(names):
        if not _NODE_NAME.fullmatch(name):
            at, must = where(names.index(name)), 'made of letters, digits, ".", "_" and "-"'
            refuse(f'{at}: the node name', name, must)
    for row in np.flatnonzero(~(starts >= 0))[:1].tolist():
        raise BadInput(
            f'{where(row)}: the interval starts at {starts[row]:g} s; it must start at 0 or later.'
        )
    for row in np.flatnonzero(~(ends > starts))[:1].tolist():
        raise BadInput(
            f'{where(row)}: the interval ends at {ends[row]:g} s; '
            f'it must end after its start at {starts[row]:g} s.'
        )
    index = {name: i for i, name in enumerate(set(names))}
    node = np.fromiter((index[name] for name in names), dtype=np.int64, count=len(names))
    order = np.lexsort((starts, node))
    earlier, later = order[:-1], order[1:]
    overlap = (node[earlier] == node[later]) & (ends[earlier] > starts[later])
    for pair in np.flatnonzero(overlap)[:1].tolist():
        first, second = int(earlier[pair]), int(later[pair])
        raise BadInput(
            f'{where(second)}: node {names[second]} is idle from {starts[second]:g} s on, but '
            f'already since {starts[first]:g} s ({where(first)}); the intervals of a node must not '
            'overlap.'
        )
