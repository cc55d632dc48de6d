"""What Cobalt's commands print, as records.

Formats as in Cobalt's source (``qstat``, ``showres``) and the user guide of Theta (``nodelist``).
"""

from __future__ import annotations

import calendar
import re
import time
from collections import defaultdict
from collections.abc import Iterator

from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    NotUnderstood,
    Partition,
)

_FIELDS = (
    'JobID',
    'User',
    'State',
    'Nodes',
    'Location',
    'Queue',
    'WallTime',
    'StartTime',
    'JobName',
)
JOBS = ('qstat', '--header', ':'.join(_FIELDS), '-l')
NODES = ('nodelist',)
QUEUES = ('qstat', '-Q', '-l')
RESERVATIONS = ('showres',)

_STATES = {
    'queued': JobState.PENDING,
    'running': JobState.RUNNING,
    'starting': JobState.STARTING,
    'killing': JobState.ENDING,
    'exiting': JobState.ENDING,
}


def parse_jobs(answer: str, pool: str) -> tuple[BatchJob, ...]:
    """Jobs in the answer to :data:`JOBS`. ``pool``: what is called the partition of every job:
    queues share the nodes. Raises NotUnderstood if a job does not have the fields that were asked
    for.
    """
    found = []
    for job in _vertical(answer, 'JobID'):
        try:
            held = 'hold' in job['State'] or 'dep_' in job['State']
            state = _STATES.get(job['State'], JobState.HELD if held else JobState.UNKNOWN)
            start_s = _time(job['StartTime']) if job['StartTime'] != 'N/A' else None
            end_s = start_s + duration_s(job['WallTime']) if start_s is not None else None
            found.append(
                BatchJob(
                    job['JobID'],
                    state,
                    pool,
                    int(job['Nodes']),
                    start_s,
                    end_s,
                    (),
                    nodes_in(job['Location']),
                    job['User'],
                    job['State'],
                    job['JobName'],
                )
            )
        except (KeyError, ValueError) as error:
            raise NotUnderstood(
                f'qstat answered {job}, which does not have the fields {":".join(_FIELDS)}: {error}'
            ) from error
    return tuple(found)


def parse_nodes(answer: str, queue: str, now: float) -> tuple[Nodes, ...]:
    """Nodes of a queue in the answer to :data:`NODES`, with the time until which the scheduler lets
    jobs be backfilled there. ``now``: when it was asked, in seconds of ``time.time()``. Raises
    NotUnderstood if it is not a table of nodes.
    """
    alike: dict[tuple[str, tuple[str, ...], float | None], list[str]] = defaultdict(list)
    for row in _table(answer, 'Node_id'):
        try:
            if queue in row['Queues'].split(':'):
                features = tuple(
                    f'{name.lower()}={row[name]}'
                    for name in ('MCDRAM', 'NUMA')
                    if row.get(name, '-') != '-'
                )
                backfill = row.get('Backfill', '-')
                # To the minute: two nodes that are drained for one job make one hole.
                until_s = (now + duration_s(backfill)) // 60 * 60 if ':' in backfill else None
                alike[row['Status'], features, until_s].append(
                    f'nid{int(row["Node_id"].strip("[]")):05}'
                )
        except (KeyError, ValueError) as error:
            raise NotUnderstood(
                f'nodelist answered {row}, which is not as documented: {error}'
            ) from error
    return tuple(
        Nodes(queue, tuple(names), state, '', features, until_s=until_s)
        for (state, features, until_s), names in alike.items()
    )


def parse_queues(answer: str) -> dict[str, Partition]:
    """Queues in the answer to :data:`QUEUES`, by name. Raises NotUnderstood if a limit is not as
    documented.
    """
    found = {}
    for queue in _vertical(answer, 'Name'):
        limit = {name: value for name, value in queue.items() if value not in ('None', '-', '')}
        try:
            found[queue['Name']] = Partition(
                queue['Name'],
                queue.get('State') == 'running',
                duration_s(limit['MaxTime']) if 'MaxTime' in limit else None,
                most_nodes=int(limit['MaxUserNodes']) if 'MaxUserNodes' in limit else None,
                shortest_s=duration_s(limit.get('MinTime', '0')),
                most_waiting=int(limit['MaxQueued']) if 'MaxQueued' in limit else None,
            )
        except ValueError as error:
            raise NotUnderstood(
                f'qstat -Q answered {queue}, which is not as documented: {error}'
            ) from error
    return found


def parse_reservations(answer: str) -> tuple[NodeReservation, ...]:
    """Reservations in the answer to :data:`RESERVATIONS`, those without nodes left out. Raises
    NotUnderstood if it is not a table of reservations.
    """
    found = []
    for row in _table(answer, 'Reservation'):
        try:
            start_s = _time(row['Start'])
            hours, minutes = row['Duration'].split(':')[:2]
            nodes = nodes_in(row.get('Nodes', row.get('Partitions', '')))
        except (KeyError, ValueError) as error:
            raise NotUnderstood(
                f'showres answered {row}, which is not as documented: {error}'
            ) from error
        if nodes:
            found.append(
                NodeReservation(
                    row['Reservation'],
                    start_s,
                    start_s + 3600 * int(hours) + 60 * int(minutes),
                    nodes,
                )
            )
    return tuple(found)


def ended(log: str) -> JobState | None:
    """How a job has ended, from its log; None where that does not tell."""
    if 'maximum execution time exceeded' in log:
        return JobState.TIMED_OUT
    if re.search(r'user delete|delet(?:ed|ion) (?:by|requested)|qdel', log):
        return JobState.CANCELLED
    if codes := re.findall(r'task completed \w+ with an exit code of (-?\d+)', log):
        return JobState.COMPLETED if codes[-1] == '0' else JobState.FAILED
    return None


def nodes_in(location: str) -> tuple[str, ...]:
    """Names of the nodes ``20-22,24``; empty if this is no list of node numbers."""
    if not re.fullmatch(r'\d+(-\d+)?(,\d+(-\d+)?)*', location):
        return ()
    ranges = (part.partition('-') for part in location.split(','))
    return tuple(
        f'nid{number:05}'
        for first, _, last in ranges
        for number in range(int(first), int(last or first) + 1)
    )


def duration_s(text: str) -> float:
    """Seconds of ``HH:MM:SS``. Raises ValueError if it is not one."""
    total = 0.0
    for part in text.split(':'):
        total = 60 * total + int(part)
    return total


def _time(text: str) -> float:
    """Of ``Mon Nov 13 08:00:00 2017 +0000 (UTC)``; without a zone it is this computer's."""
    found = re.match(r'(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})(?: ([+-])(\d\d)(\d\d))?', text)
    if found is None:
        raise ValueError(f'{text!r} is not a time')
    parsed = time.strptime(found[1], '%a %b %d %H:%M:%S %Y')
    if found[2] is None:
        return time.mktime(parsed)
    offset = (3600 * int(found[3]) + 60 * int(found[4])) * (1 if found[2] == '+' else -1)
    return float(calendar.timegm(parsed) - offset)


def _vertical(answer: str, first: str) -> Iterator[dict[str, str]]:
    """Records of ``Field : value`` lines, each beginning with the field ``first``."""
    record: dict[str, str] = {}
    for line in answer.splitlines():
        name, colon, value = line.partition(':')
        if not colon:
            continue
        if name.strip() == first and record:
            yield record
            record = {}
        record[name.strip()] = value.strip()
    if record:
        yield record


def _table(answer: str, first: str) -> Iterator[dict[str, str]]:
    """Rows of a table whose columns begin where their heads do; a cell may have spaces."""
    lines = answer.splitlines()
    top = next((number for number, line in enumerate(lines) if line.startswith(first)), None)
    if top is None:
        if answer.strip():
            raise NotUnderstood(
                f'the answer {answer[:80]!r} is not a table with the column {first}'
            )
        return
    heads = [(found.start(), found[0]) for found in re.finditer(r'\S+(?: \S+)*', lines[top])]
    ends = [start for start, _ in heads[1:]] + [10_000]
    for line in lines[top + 1 :]:
        if line.strip() and not line.startswith('='):
            yield {
                name: line[start:end].strip()
                for (start, name), end in zip(heads, ends, strict=True)
            }
