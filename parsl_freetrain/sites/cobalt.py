"""Cobalt, the scheduler of Theta, all of it: settings, commands and answers (formats as in Cobalt's
``qstat`` and ``showres``, and Theta's ``nodelist``), batch scripts.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.sites.batch import records as rc
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.options import BatchOptions, Line, Option, Word
from parsl_freetrain.sites.batch.scheduler_commands import Commands, offered
from parsl_freetrain.sites.batch.shell import batch_script, run_with_launcher, until_deadline
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.registry import SiteType

_FIELDS = 'JobID:User:State:Nodes:Location:Queue:WallTime:StartTime:JobName'
JOBS = ('qstat', '--header', _FIELDS, '-l')
NODES = ('nodelist',)
QUEUES = ('qstat', '-Q', '-l')
RESERVATIONS = ('showres',)

_STATES = {
    'queued': rc.JobState.PENDING,
    'running': rc.JobState.RUNNING,
    'starting': rc.JobState.STARTING,
    'killing': rc.JobState.ENDING,
    'exiting': rc.JobState.ENDING,
}
_GRACE_S = 10.0
_LIFETIME = """case $COBALT_STARTTIME$COBALT_ENDTIME in
    ''|*[!0-9]*) left=$(({limit} - SECONDS)) ;;
    *) left=$((COBALT_ENDTIME - COBALT_STARTTIME - SECONDS)) ;;  # of one clock
esac
"""

Attribute = Annotated[
    str,
    Meta(pattern=r'^[^\s:=\x00-\x1f]+\Z', description='a text without spaces and without : or ='),
]


class CobaltOptions(BatchOptions, frozen=True, kw_only=True):
    """One queue of a machine with Cobalt; see also BatchOptions.

    Attributes
    ----------
    queue
        Where blocks are submitted.
    mcdram, numa
        Memory mode of KNL nodes, such as 'cache' or 'flat' and 'quad'. Only nodes in this mode
        count as part of a hole, since a change reboots them. None: any mode.
    filesystems
        As for ``--attrs filesystems=``.
    attrs
        More attributes of ``--attrs``.
    cobalt_options, aprun_options
        More options, each complete.
    """

    queue: Word
    mcdram: Attribute | None = None
    numa: Attribute | None = None
    filesystems: tuple[Attribute, ...] = ()
    attrs: dict[Attribute, Attribute] = field(default_factory=dict)
    cobalt_options: tuple[Option, ...] = ()
    aprun_options: tuple[Line, ...] = ('-cc', 'none')

    def __post_init__(self) -> None:
        if self.requeue:
            refuse('requeue', True, 'False: Cobalt does not put jobs back into its queue')

    def modes(self) -> dict[str, str]:
        modes = {'mcdram': self.mcdram, 'numa': self.numa}
        return {name: value for name, value in modes.items() if value is not None}


class Cobalt:
    label = 'Cobalt'
    step_s = 60
    script_mode = 0o700  # Cobalt runs the script itself, and not a copy
    nodes_every_s = 0.0  # they tell until when they can be had
    history_every_s = 0.0  # it is in files of the block's own

    def __init__(self, options: CobaltOptions) -> None:
        self._options = options
        self.client = Commands('Cobalt', options.command_s, meddling=('QSTAT_', 'COBALT_'))

    def queue(self) -> rc.Partition:
        queues = parse_queues(self.client.ask(QUEUES))
        return offered('Cobalt', 'queue', self._options.queue, queues)

    def wanted(self) -> Wanted:
        modes = frozenset(f'{name}={value}' for name, value in self._options.modes().items())
        return Wanted(self._options.queue, (modes,) if modes else ())

    def jobs(self) -> tuple[rc.BatchJob, ...]:
        return parse_jobs(self.client.ask(JOBS), self._options.queue)

    def nodes(self) -> tuple[rc.Nodes, ...]:
        return parse_nodes(self.client.ask(NODES), self._options.queue, time.time())

    def reservations(self) -> tuple[rc.NodeReservation, ...]:
        return parse_reservations(self.client.ask(RESERVATIONS))

    def history(self, places: dict[str, Output]) -> dict[str, rc.JobState]:
        """What each job's own log says; Cobalt itself forgets a job that is over."""
        found = {}
        for job_id, place in places.items():
            try:
                log = Path(_log_of(place)).read_text(errors='replace') if place.stdout else ''
            except OSError:
                continue
            if (state := ended(log)) is not None:
                found[job_id] = state
        return found

    def needs_s(self, shape: BlockShape) -> int:
        return shape.walltime_s

    def render(self, shape: BlockShape, place: Output, command: str, worker_init: str = '') -> str:
        """For qsub, on a service node: aprun starts one process on each compute node."""
        launch = ['aprun', '-n', str(shape.nodes), '-N', '1', *self._options.aprun_options]
        return batch_script(
            (f'#COBALT {line}' for line in _directives(self._options, shape, place)),
            self._options,
            worker_init,
            _LIFETIME.format(limit=shape.walltime_s) + until_deadline(shape.deadline),
            run_with_launcher(launch, command, _GRACE_S),
        )

    def test(self, script: Path) -> None:
        """Cobalt cannot be asked: qsub submits, or refuses."""

    def submit(self, script: Path) -> str:
        """``qsub``, whose options stand in the script."""
        return self.client.submit(('qsub', str(script)), r'(\d+)')

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``qdel``; jobs that it does not find are over."""
        self.client.cancel(('qdel', *job_ids), ('not found', 'no jobs'))


class CobaltSite(BatchSite):
    """One queue of a machine with Cobalt; see :class:`CobaltOptions`."""

    name, job_variable = 'cobalt', 'COBALT_JOBID'
    options_type, scheduler_type = CobaltOptions, Cobalt
    options: CobaltOptions


PROGRAMS = 'qsub', 'qstat', 'qdel', 'nodelist', 'showres'
SITE_TYPE = SiteType(
    'cobalt', 'Cobalt', CobaltSite, CobaltOptions, PROGRAMS, ('qstat', '--version')
)


def parse_jobs(answer: str, pool: str) -> tuple[rc.BatchJob, ...]:
    """Jobs in the answer to :data:`JOBS`; ``pool``: their partition, as queues share the nodes."""
    found = []
    for job in _vertical(answer, 'qstat', 'JobID'):
        with rc.as_documented('qstat', job):
            held = 'hold' in job['State'] or 'dep_' in job['State']
            start_s = rc.time_of(job['StartTime']) if job['StartTime'] != 'N/A' else None
            limit_s = rc.seconds_of(job['WallTime'])
            one = rc.BatchJob(
                job['JobID'],
                _STATES.get(job['State'], rc.JobState.HELD if held else rc.JobState.UNKNOWN),
                pool,
                int(job['Nodes']),
                start_s,
                None if start_s is None else start_s + limit_s,
                names=_nodes_in(job['Location']),
                user=job['User'],
                reason=job['State'],
                name=job['JobName'],
                limit_s=limit_s,
            )
            found.append(one)
    return tuple(found)


def parse_nodes(answer: str, queue: str, now: float) -> tuple[rc.Nodes, ...]:
    """Nodes of a queue in :data:`NODES`, with the time until which they backfill."""
    alike: dict[tuple[str, tuple[str, ...], float | None], list[str]] = defaultdict(list)
    for row in _table(answer, 'nodelist', 'Node_id'):
        with rc.as_documented('nodelist', row):
            if queue not in row['Queues'].split(':'):
                continue
            modes = (name for name in ('MCDRAM', 'NUMA') if row.get(name, '-') != '-')
            features = tuple(f'{name.lower()}={row[name]}' for name in modes)
            backfill = row.get('Backfill', '-')
            # To the minute: two nodes that are drained for one job make one hole.
            until_s = (now + rc.seconds_of(backfill)) // 60 * 60 if ':' in backfill else None
            name = f'nid{int(row["Node_id"].strip("[]")):05}'
            alike[row['Status'], features, until_s].append(name)
    return tuple(
        rc.Nodes(queue, tuple(names), state, '', features, until_s=until_s)
        for (state, features, until_s), names in alike.items()
    )


def parse_queues(answer: str) -> dict[str, rc.Partition]:
    found = {}
    for queue in _vertical(answer, 'qstat -Q', 'Name'):
        limit = {name: value for name, value in queue.items() if value not in ('None', '-', '')}
        with rc.as_documented('qstat -Q', queue):
            found[queue['Name']] = rc.Partition(
                queue['Name'],
                queue.get('State') == 'running',
                rc.seconds_of(limit['MaxTime']) if 'MaxTime' in limit else None,
                most_nodes=int(limit['MaxUserNodes']) if 'MaxUserNodes' in limit else None,
                shortest_s=rc.seconds_of(limit.get('MinTime', '0')),
                most_waiting=int(limit['MaxQueued']) if 'MaxQueued' in limit else None,
            )
    return found


def parse_reservations(answer: str) -> tuple[rc.NodeReservation, ...]:
    """Reservations in the answer to :data:`RESERVATIONS`, those without nodes left out."""
    found = []
    for row in _table(answer, 'showres', 'Reservation'):
        with rc.as_documented('showres', row):
            start_s = rc.time_of(row['Start'])
            hours, minutes = row['Duration'].split(':')[:2]
            if nodes := _nodes_in(row.get('Nodes', row.get('Partitions', ''))):
                end_s = start_s + 3600 * int(hours) + 60 * int(minutes)
                found.append(rc.NodeReservation(row['Reservation'], start_s, end_s, nodes))
    return tuple(found)


def ended(log: str) -> rc.JobState | None:
    """How a job has ended, from its log; None where that does not tell."""
    if 'maximum execution time exceeded' in log:
        return rc.JobState.TIMED_OUT
    if re.search(r'user delete|delet(?:ed|ion) (?:by|requested)|qdel', log):
        return rc.JobState.CANCELLED
    if codes := re.findall(r'task completed \w+ with an exit code of (-?\d+)', log):
        return rc.JobState.COMPLETED if codes[-1] == '0' else rc.JobState.FAILED
    return None


def _nodes_in(location: str) -> tuple[str, ...]:
    if not re.fullmatch(r'\d+(-\d+)?(,\d+(-\d+)?)*', location):
        return ()
    parts = (part.partition('-') for part in location.split(','))
    numbers = (range(int(first), int(last or first) + 1) for first, _, last in parts)
    return tuple(f'nid{number:05}' for each in numbers for number in each)


def _vertical(answer: str, command: str, first: str) -> Iterator[dict[str, str]]:
    """Records of ``Field : value`` lines, each beginning with the field ``first``."""
    begin = rf'[ \t]*{first}[ \t]*:'
    for text in re.split(f'(?m)^(?={begin})', rc.after_banner(answer, command, begin)):
        fields = (line.partition(':') for line in text.splitlines())
        if record := {name.strip(): value.strip() for name, colon, value in fields if colon}:
            yield record


def _table(answer: str, command: str, first: str) -> Iterator[dict[str, str]]:
    """Rows of a table whose columns begin where their heads do; a cell may have spaces."""
    head, _, rows = rc.after_banner(answer, command, first).partition('\n')
    heads = [(found.start(), found[0]) for found in re.finditer(r'\S+(?: \S+)*', head)]
    ends = [start for start, _ in heads[1:]] + [10_000]
    for line in rows.splitlines():
        if line.strip() and not line.startswith('='):
            cells = (line[start:end].strip() for (start, _), end in zip(heads, ends, strict=True))
            yield dict(zip((name for _, name in heads), cells, strict=True))


def _directives(options: CobaltOptions, shape: BlockShape, place: Output) -> list[str]:
    attrs = {**options.modes(), **options.attrs}
    if options.filesystems:
        attrs['filesystems'] = ','.join(options.filesystems)
    if shape.names:
        attrs['location'] = ','.join(str(int(name.removeprefix('nid'))) for name in shape.names)
    said = [
        f'--jobname {place.name}',
        f'-o {_path(place.stdout)}',
        f'-e {_path(place.stderr)}',
        f'--debuglog {_path(_log_of(place))}',
        f'-q {options.queue}',
        f'-n {shape.nodes}',
        f'-t {shape.walltime_s // 60}',
    ]
    if options.account is not None:
        said.append(f'-A {options.account}')
    if attrs:
        said.append('--attrs ' + ':'.join(f'{name}={value}' for name, value in attrs.items()))
    return [*said, *options.cobalt_options]


def _log_of(place: Output) -> str:
    """Cobalt's own record of a job, which outlives it."""
    return f'{place.stdout.removesuffix(".out")}.cobaltlog'


def _path(path: str) -> str:
    if re.search(r'[\s\'"\\]', path):
        raise BadInput(
            f'Cobalt cannot write to {path!r}, because of a space, a quote or a backslash in it; '
            'use a folder with another name.'
        )
    return path
