"""Questions to Slurm 22.05 and later, and answers as text; times are in epoch seconds."""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from parsl_freetrain.sites.batch import records as rc
from parsl_freetrain.sites.slurm.words import end_of, expand, state_of

logger = logging.getLogger(__name__)

_JOB_FIELDS = 'iTPDSeYNurlQnxbvfCcmhj'  # letters of squeue's --format
_NODE_FIELDS = '%R|%T|%G|%b|%c|%m|%N'  # %b: the active features
# How the reasons of a pending job begin that more idle nodes may let start. Which nodes a
# reservation or a fault keeps from it is looked at for each; Slurm's words on that may be old.
_FOR_NODES = ('None', 'Resources', 'Priority', 'ReqNodeNotAvail', 'Nodes required for job are')
SHARING = ('OK', 'YES')  # OverSubscribe of jobs that do not ask for whole nodes
_NOTHING = ('', '(null)', 'N/A')
# In an answer, the names of Gres other than GPUs; not TRES that are none, such as cpu=4.
_TRES = 'gres|gpu|cpu|mem|node|billing'
_OTHER_GRES = re.compile(rf'(?:^|,)(?:gres[:/])?(?!(?:{_TRES})\b)([a-zA-Z]\w*)(?=[:=,(]|$)')
_UNLIMITED = *_NOTHING, 'UNLIMITED', 'INFINITE', 'infinite', 'NONE', 'NOT_SET', 'INVALID'
_MARKS = '*~#!%$@^-+'

JOBS = ('squeue', '--noheader', '--all', '--states=all')  # what is told of a job: see job_format
# Without --exact, unlike nodes would be told with the fewest CPUs of all.
NODES = ('sinfo', '--noheader', '--all', '--exact', f'--format={_NODE_FIELDS}')
# How jobs have ended, for which --format has no field.
EXITS = ('squeue', '--noheader', '--all', '--states=all', '--Format=JobID:32,exit_code:16')
# GPUs that --format cannot tell; its answers have columns, so that none of them can be forged.
_GPU_COLUMNS = 'JobArrayID', 'tres-per-socket', 'tres-per-job', 'tres-per-task', 'NumTasks'
_WIDTH = 64
_COLUMNS = ','.join(f'{name}:{_WIDTH}' for name in _GPU_COLUMNS)
GPUS = ('squeue', '--noheader', '--all', '--states=PENDING', f'--Format={_COLUMNS}')
RESERVATIONS = ('scontrol', 'show', 'reservation', '--oneliner')
PARTITIONS = ('scontrol', 'show', 'partition', '--all', '--oneliner')
CONFIG = ('scontrol', 'show', 'config')
# To the accounting database, about jobs that the queue has forgotten.
_ENDS = '--format=JobIDRaw,State,ExitCode'
HISTORY = ('sacct', '--allocations', '--noheader', '--parsable2', _ENDS)


@rc.as_documented('squeue')
def parse_exits(answer: str) -> dict[str, int]:
    lines = (line.split() for line in answer.splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdigit()}


def job_format(mark: str) -> str:
    """What :data:`JOBS` is to tell of each job, for the environment variable SQUEUE_FORMAT (command
    lines can be read by all). Each record and field begins with ``mark``, 16 random digits, so that
    no user can write, in a name, what looks like another job's record.
    """
    bar = f'|{mark}'
    return f'{bar}<' + bar.join(f'%{letter}' for letter in _JOB_FIELDS) + f'{bar}>'


def parse_jobs(answer: str) -> tuple[rc.BatchJob, ...]:
    """Jobs in the answer to :data:`JOBS`, which begins with the mark of :func:`job_format`. Raises
    NotUnderstood if it was cut off, or no job can be read.
    """
    if not (answer := rc.after_banner(answer, 'squeue', r'\|[0-9a-f]{16}<')):
        return ()
    begin, _, _ = answer.partition('<')
    records = [record.split(begin) for record in answer.split(f'{begin}<')[1:]]
    if any(fields.pop().strip() != '>' for fields in records):
        raise rc.NotUnderstood('the answer of squeue was cut off')
    jobs = ((''.join(fields[:1]).strip(), fields[1:]) for fields in records)
    return rc.all_of(jobs, _job, 'squeue')


def _job(job_id: str, fields: list[str]) -> rc.BatchJob:
    state, partition, nodes, start, end, planned, names, user, reason, *rest = fields
    limit, priority, only, excluded, gres, reservation, features, *rest = rest
    cpus, step, memory, shared, name = rest
    least_mib = mib_of(memory)
    return rc.BatchJob(
        job_id,
        state_of(state),
        partition,
        _count(nodes),
        _time(start),
        _time(end),
        expand(planned),
        expand(names),
        user,
        reason,
        name,
        limit_s=duration_s(limit),
        priority=float(_number(priority)),
        blocked=is_blocked(reason, reservation),
        only=expand(only),
        excluded=expand(excluded),
        features=choices_of(features, gres),
        gpus=gpus_of(gres),
        tasks=tasks_of(job_id.partition('_')[2]),
        cpus=_number(cpus) if shared in SHARING else 0,
        step=max(1, _number(step)),
        memory=least_mib,
        memory_per_cpu=least_mib,  # squeue does not tell which of the two was asked for
    )


def queued_as(job_id: str) -> str:
    """What stays of a job's id when tasks of its array have started."""
    return job_id.partition('[')[0]


@rc.as_documented('squeue')
def parse_gpus(answer: str) -> dict[str, list[str]]:
    """The columns of each job in the answer to :data:`GPUS`, by :func:`queued_as`."""
    starts = range(0, _WIDTH * len(_GPU_COLUMNS), _WIDTH)
    rows = ([line[at : at + _WIDTH].strip() for at in starts] for line in answer.splitlines())
    return {queued_as(job_id): told for job_id, *told in rows}


def with_gpus(jobs: Iterable[rc.BatchJob], told: Mapping[str, list[str]]) -> list[rc.BatchJob]:
    """Jobs with the GPUs that :func:`parse_gpus` tells of those that seem to want none."""
    found = []
    for job in jobs:
        if not job.gpus and (words := told.get(queued_as(job.job_id))):
            types = frozenset(features_of('', ','.join(words[:3])))
            wanted = (each | types for each in job.features or (frozenset[str](),))
            gpus = gpus_on_each(job.nodes, _number(words[3]), '', *words[:3])
            job = replace(job, gpus=gpus, features=tuple(filter(None, wanted)))
        found.append(job)
    return found


def gpus_on_each(
    nodes: int, tasks: int, gres: str, socket: str = '', of_job: str = '', task: str = ''
) -> int:
    """How many GPUs a job asks for on each of its nodes, by what it says of any of these."""
    in_all = gpus_of(of_job) or gpus_of(task) * max(1, tasks)
    return gpus_of(gres) or gpus_of(socket) or -(-in_all // max(1, nodes))


def mib_of(text: str) -> float:
    found = re.fullmatch(r'(\d+(?:\.\d+)?)([KMGT]?)', text.strip())
    return float(found[1]) * 1024.0 ** ('KMGT'.find(found[2] or 'M') - 1) if found else 0.0


@rc.as_documented('sinfo')
def parse_nodes(answer: str) -> tuple[rc.Nodes, ...]:
    """Nodes in the answer to :data:`NODES`. Raises NotUnderstood if a line has other fields."""
    found = []
    answer = rc.after_banner(answer, 'sinfo', r'([^|\n]*\|){6}[^|\n]*$', None)
    for line in _lines(answer, 'sinfo'):
        fields = line.strip().split('|')
        if fields == ['']:
            continue
        if len(fields) != 7:
            lacks = f'does not have the fields {_NODE_FIELDS}'
            raise rc.NotUnderstood(f'sinfo answered {line[:200]!r}, which {lacks}')
        partition, state, gres, features, cpus, memory, names = fields
        bare = state.rstrip(_MARKS)
        marks, has, gpus = state[len(bare) :], features_of(features, gres), gpus_of(gres)
        size, mib = _number(cpus.rstrip('+')), mib_of(memory.rstrip('+'))
        nodes = rc.Nodes(partition, expand(names), bare.lower(), marks, has, gpus)
        found.append(replace(nodes, cpus=size, memory=mib))
    return tuple(found)


@rc.as_documented('scontrol show reservation')
def parse_reservations(answer: str) -> tuple[rc.NodeReservation, ...]:
    """Reservations with nodes; unreadable times last for ever, unreadable nodes are all."""
    found = []
    command, none = 'scontrol show reservation', 'No reservations in the system'
    answer = rc.after_banner(answer, command, 'ReservationName=', none)
    for line in filter(None, _lines(answer, command)):
        fields, everywhere, start, end = _pairs(line), False, None, None
        nodes: tuple[str, ...] = ()
        with suppress(rc.NotUnderstood):
            start, end = _time(fields.get('StartTime', '')), _time(fields.get('EndTime', ''))
        if start is None or end is None:
            rc.warn_once(f'A reservation of Slurm has no times in seconds: {line[:200]!r}')
            start, end = 0.0, math.inf
        try:
            nodes = expand(fields.get('Nodes', ''))
        except rc.NotUnderstood as error:
            rc.warn_once(f'A reservation of Slurm may have any nodes, {line[:200]!r}: {error}')
            everywhere = True
        if nodes or everywhere:
            name = fields['ReservationName']
            found.append(rc.NodeReservation(name, start, end, nodes, everywhere))
    return tuple(found)


@rc.as_documented('scontrol show partition')
def parse_partitions(answer: str) -> dict[str, rc.Partition]:
    answer = rc.after_banner(answer, 'scontrol show partition', 'PartitionName=')
    lines = (_pairs(line) for line in answer.splitlines() if line.startswith('PartitionName='))
    return {fields['PartitionName']: _partition(fields) for fields in lines}


def _partition(fields: dict[str, str]) -> rc.Partition:
    most = fields.get('MaxNodes', '')
    return rc.Partition(
        fields['PartitionName'],
        fields.get('State', 'UP') == 'UP',
        duration_s(fields.get('MaxTime', '')),
        _count(fields.get('MinNodes', '0')),
        None if most in _UNLIMITED else _count(most),
        fields.get('PreemptMode', 'OFF').split(',')[0],
        float(_count(fields.get('GraceTime', '0'))),
        _listed(fields.get('AllowAccounts', '')),
        _listed(fields.get('DenyAccounts', '')),
        _listed(fields.get('AllowQos', '')),
        tier=_number(fields.get('PriorityTier', '')),
    )


@rc.as_documented('sacct')
def parse_history(answer: str) -> dict[str, rc.JobState]:
    """Final states in the answer to :data:`HISTORY`, by job id."""
    found = {}
    for line in answer.splitlines():
        job_id, state, ended = (*line.split('|'), '', '')[:3]
        if state.strip():
            status, _, number = ended.partition(':')
            found[job_id] = end_of(state_of(state), _number(status), _number(number))
    return found


def can_shrink(config: str) -> bool:
    """Whether a job that gave nodes away leaves nothing there and can again, by :data:`CONFIG`."""
    fields = dict(re.findall(r'^(\w+)\s*=\s*(\S+)', config, re.MULTILINE))
    kept = fields.get('AccountingStorageType', 'none').rpartition('/')[2]
    return fields.get('ProctrackType') == 'proctrack/cgroup' and kept not in ('none', '(null)')


def is_blocked(reason: str, reservation: str = '') -> bool:
    """Whether a pending job waits for something else than nodes that all may use."""
    for_nodes = not reason or reason.replace('_', ' ').startswith(_FOR_NODES)
    return not for_nodes or reservation not in _NOTHING


def choices_of(constraint: str, gres: str) -> tuple[frozenset[str], ...]:
    """Sets of features and GPU types of ``a&b|c``; any feature of groups and counts."""
    said = '' if constraint in _NOTHING else constraint
    if re.search(r'[][()*]', said):
        said = '|'.join(re.findall(r'[\w.:+-]+', re.sub(r'\*\d+', '', said)))
    types = features_of('', gres)
    chosen = [frozenset((*re.split('[&,]', each), *types)) for each in said.split('|') if each]
    return tuple(chosen) or ((frozenset(types),) if types else ())


def tasks_of(tasks: str) -> int:
    """Number of jobs in the tasks of an array, such as ``[0-3,7%2]`` or ``5``; 1 without any."""
    words, _, at_once = tasks.strip('[]').partition('%')
    count = 0
    for word in words.replace('...', '').split(','):
        first, _, last = word.partition(':')[0].partition('-')
        step = word.partition(':')[2]
        if first.isdigit():
            count += (int(last or first) - int(first)) // int(step or 1) + 1
    return max(1, min(count, int(at_once))) if at_once.isdigit() else max(1, count)


def duration_s(text: str) -> float | None:
    """Seconds of ``days-hours:minutes:seconds``; None: unlimited. Raises NotUnderstood."""
    if text in _UNLIMITED:
        return None
    days, dash, rest = text.rpartition('-')
    try:
        parts = [int(part) for part in rest.split(':')]
        if dash:  # days-hours[:minutes[:seconds]]
            hours, minutes, seconds = (*parts, 0, 0)[:3]
        elif len(parts) == 1:
            hours, minutes, seconds = 0, parts[0], 0
        else:
            hours, minutes, seconds = (0, *parts)[-3:]
        return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
    except ValueError:
        raise rc.NotUnderstood(
            f'{text[:40]!r} is not a duration as Slurm writes it, days-hours:minutes:seconds'
        ) from None


def _gpus(gres: str) -> list[tuple[str, int]]:
    """Types and numbers (one where unsaid) in ``gpu:a100:4(S:0-1),gres/gpu,craynetwork:4``."""
    found = []
    bare = gres.replace(':(null)', '')  # a type that nobody has named
    for words in re.findall(r'(?:^|,)(?:gres[:/])?gpu((?:[:=][^:=,()]+)*)(?=[,(]|$)', bare):
        kind = re.split('[:=]', words)[1:]
        count = int(kind.pop()) if kind and kind[-1].isdigit() else 1
        found.append((kind[0] if kind else '', count))
    return found


def gpus_of(gres: str) -> int:
    return sum(count for _, count in _gpus(gres))


def features_of(text: str, gres: str) -> tuple[str, ...]:
    """Node features, without brackets' counts, the types of GPUs, such as ``gpu:a100``, and the
    names of other Gres, such as ``gres/shard``.
    """
    named = () if text in _NOTHING else tuple(text.split(','))
    others = (f'gres/{name}' for name in _OTHER_GRES.findall(gres))
    types = (f'gpu:{kind}' for kind, _ in _gpus(gres) if kind)
    return (*named, *dict.fromkeys((*types, *others)))


def as_it_shares(job: rc.BatchJob, with_memory: bool) -> rc.BatchJob:
    """A job that asks for Gres that are not counted here gets whole nodes, as does one without a
    size of its memory where memory is given to jobs (``with_memory``): it has all of it.
    """
    whole = any(word.startswith('gres/') for each in job.features for word in each)
    return replace(job, cpus=0) if whole or (with_memory and not job.memory) else job


def _lines(answer: str, command: str) -> list[str]:
    if answer and not answer.endswith('\n'):  # "node1" may be the begin of "node12"
        raise rc.NotUnderstood(f'the answer of {command} was cut off')
    return answer.splitlines()


def _pairs(line: str) -> dict[str, str]:
    """The first value of each name: what follows may stand in a comment."""
    found: dict[str, str] = {}
    for word in line.split():
        name, is_pair, value = word.partition('=')
        if is_pair:
            found.setdefault(name, value)
    return found


def _listed(text: str) -> tuple[str, ...]:
    return () if text in (*_NOTHING, 'ALL') else tuple(text.split(','))


def _count(text: str) -> int:
    found = re.fullmatch(r'(\d+(?:\.\d+)?)([KMG]?)(?:-\d+)?', text.strip())
    if found is None:
        raise rc.NotUnderstood(f'{text[:40]!r} is not a number')
    return int(float(found[1]) * {'': 1, 'K': 1024, 'M': 1024**2, 'G': 1024**3}[found[2]])


def _number(text: str) -> int:
    """Of what need not be a number; 1024 CPUs are told as 1K."""
    return _count(text) if re.fullmatch(r'\d+[KMG]?', text) else 0


def _time(text: str) -> float | None:
    """Seconds since the epoch; None: not known yet, or never."""
    if text.isdecimal():
        return float(text) or None
    if text not in (*_UNLIMITED, *_NOTHING, 'Unknown'):
        raise rc.NotUnderstood(f'{text[:40]!r} is no time in seconds')
    return None
