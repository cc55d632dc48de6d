"""What PBS answers, as records: qstat and pbsnodes (the PBS Reference Guide, OpenPBS's ``job.h``),
and the text of pbs_rstat.
"""

import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from parsl_freetrain.sites.batch import records as rc
from parsl_freetrain.sites.pbspro.documents import document
from parsl_freetrain.sites.pbspro.recurring import later_starts

logger = logging.getLogger(__name__)

JOBS = ('qstat', '-f', '-F', 'json')
NODES = ('pbsnodes', '-a', '-F', 'json')
QUEUES = ('qstat', '-Q', '-f', '-F', 'json')
SERVER = ('qstat', '-B', '-f', '-F', 'json')
HISTORY = ('qstat', '-x', '-f', '-F', 'json')
RESERVATIONS = ('pbs_rstat', '-f')

# Letters of job_state. W: waits for a date, T: on its way to another queue, B: an array that has
# begun, U: suspended because its workstation is in use. M, moved to another server, is not ours.
_LETTERS = {
    rc.JobState.PENDING: 'QB',
    rc.JobState.HELD: 'HWT',
    rc.JobState.RUNNING: 'R',
    rc.JobState.ENDING: 'E',
    rc.JobState.SUSPENDED: 'SU',
}
_STATES = {letter: state for state, letters in _LETTERS.items() for letter in letters}
_WITH_NODES = (rc.JobState.RUNNING, rc.JobState.ENDING, rc.JobState.SUSPENDED)
_DELETED = 91  # substate: ended by qdel, or by a preemption that deletes
_ENDS = {0: rc.JobState.COMPLETED, -29: rc.JobState.TIMED_OUT}  # by exit status
_ENDS |= dict.fromkeys((-26, -27), rc.JobState.OUT_OF_MEMORY)
_ENDS |= dict.fromkeys((128 + 15, 256 + 15), rc.JobState.PREEMPTED)  # on SIGTERM
# PBS renews only the estimates of the first backfill_depth jobs.
_STALE_S = 120.0
_TASKS = re.compile(r'(\w+):(\d+)')
# How comments begin of jobs that more idle nodes would not start (OpenPBS's job_info.cpp): a limit,
# a resource of the server such as licences, a time of day, or what no node can give. Where nodes
# are what is lacking, other comments say so, also "Node has reached user run limit".
_BLOCKED = re.compile(
    'Can Never Run|Not Running: ('
    'Queue |Server |User |Group |Project |would exceed |Number of concurrent running subjobs '
    '|Insufficient amount of (queue|server) resource|PBS Error|Cannot provision|Specified '
    '|Dedicated time|Job will |Job would cross |Job would exceed |Job exceeds |Job is under '
    "|Job has zero shares|Not enough total nodes|can't fit in the largest placement set)"
)
_LEAST = {rc.JobState.PENDING: 'min_walltime'}  # PBS may shorten a job when it starts
_NAMES = 'host', 'vnode'
_RANK = 4096.0  # more than the priorities of two jobs can differ
_SIZE = re.compile(r'(\d+(?:\.\d+)?)([kmgtp]?)([bw]?)', re.IGNORECASE)


def parse_jobs(
    answer: str,
    pool: str,
    features: Collection[str] = (),
    apart: Collection[str] = (),
    ranks: Mapping[str, int] = {},
) -> tuple[rc.BatchJob, ...]:
    """Jobs in the answer to :data:`JOBS` or :data:`HISTORY`, or NotUnderstood; nothing is known
    of one that is there twice or cannot be read. ``pool``: what is called the partition, as queues
    share the nodes; jobs that can get none have no partition. ``features``: all of the pool's;
    ``apart``: queues with other nodes; ``ranks``: priorities of queues.
    """
    said = document(answer, 'qstat')

    def read(job_id: str, job: Mapping[str, Any]) -> rc.BatchJob:
        of = '' if job.get('queue') in apart else pool
        return _job(job_id, job, of, now, ranks, features)

    with rc.as_documented('qstat'):
        if not said.keys() & {'timestamp', 'Jobs'}:
            raise rc.NotUnderstood(f'the document of qstat has no Jobs: {said}'[:300])
        now = float(said.get('timestamp', time.time()))
        jobs = said.get('Jobs', {}).items()
        jobs = [(name, job) for name, job in jobs if job is None or 'job_state' in job]
    return rc.all_of(jobs, read, 'qstat')


def _job(
    job_id: str,
    job: Mapping[str, Any],
    pool: str,
    now: float,
    ranks: Mapping[str, int],
    known: Collection[str],
) -> rc.BatchJob:
    letter, resources = job['job_state'], job.get('Resource_List') or {}
    comment = str(job.get('comment', ''))
    state = _ended(job) if letter in ('F', 'X') else _STATES.get(letter, rc.JobState.UNKNOWN)
    counts = dict(_TASKS.findall(str(job.get('array_state_count', ''))))
    may_run = int(job.get('max_run_subjobs', 10**9)) - int(counts.get('Running', 0))
    tasks = min(int(counts.get('Queued', 1)), may_run)
    if state is rc.JobState.PENDING and tasks <= 0:
        state = rc.JobState.HELD  # all of its jobs run, or as many as may
    start_s = end_s = limit_s = None
    with suppress(ValueError):  # none, or a word for that
        limit_s = rc.seconds_of(resources.get(_LEAST.get(state)) or resources.get('walltime') or '')
    planned: tuple[str, ...] = ()
    if letter in ('Q', 'B') and 'start_time' in (estimate := job.get('estimated') or {}):
        with suppress(ValueError):  # no time yet
            times = [t for t in _times(estimate['start_time']) if t >= now - _STALE_S]
            if times:
                start_s, planned = times[0], hosts_of(estimate.get('exec_vnode', ''))
    elif state in _WITH_NODES:
        start_s = _began(job, now)
        end_s = None if limit_s is None else start_s + limit_s
    names = hosts_of(job.get('exec_vnode', '')) if state in _WITH_NODES else ()
    nodes = int(resources.get('nodect', len(names) or 1))
    place, select = (str(resources.get(name, '')) for name in ('place', 'select'))
    words, only = _wishes(select, known)
    # Which of unlike chunks share a node is not known: they get whole ones.
    unlike = len({re.sub(r'^\d+:', '', chunk) for chunk in select.split('+')}) > 1
    cpus = 0 if unlike or 'excl' in place else _count(resources.get('ncpus', 0))
    return rc.BatchJob(
        job_id,
        state,
        '' if all(not each.issubset(known) for each in words) else pool,
        nodes,
        start_s,
        end_s,
        planned,
        names,
        re.sub('@[^@]*$', '', str(job.get('Job_Owner', ''))),  # names of users may have an @
        comment,
        str(job.get('Job_Name', '')),
        _count(job.get('run_count', 0)),
        limit_s,
        priority=_RANK * ranks.get(job.get('queue', ''), 0) + _count(job.get('Priority', 0)),
        blocked=_BLOCKED.match(comment) is not None,
        only=only,
        features=tuple(dict.fromkeys(words)) if all(words) else (),
        tasks=max(1, tasks),
        gpus=0 if not cpus else -(-_count(resources.get('ngpus', 0)) // nodes),
        cpus=cpus,
        step=max(1, cpus // nodes),
        least_nodes=1 if cpus and 'scatter' not in place else 0,  # chunks may be on one host
        memory=(_amount(str(resources.get('mem', 0))) or 0.0) / 2**20 / nodes,
    )


def _began(job: Mapping[str, Any], now: float) -> float:
    """When a job began; now if its nodes are still made ready."""
    if 'stime' not in job:
        return now
    ran_s = rc.seconds_of((job.get('resources_used') or {}).get('walltime') or 0)
    earlier, later = _times(job['stime'])
    return later if later <= now - ran_s + _STALE_S else earlier


def _wishes(
    select: str, known: Collection[str]
) -> tuple[tuple[frozenset[str], ...], tuple[str, ...]]:
    """What each chunk wants of the words that are known of nodes, and the hosts that are named."""
    named = {feature.partition('=')[0] for feature in known}
    chunks = [[part.partition('=') for part in chunk.split(':')] for chunk in select.split('+')]
    hosts = (_host(at) for chunk in chunks for name, _, at in chunk if name in _NAMES)
    words = (
        frozenset(f'{name}={value}'.lower() for name, _, value in chunk if name.lower() in named)
        for chunk in chunks
    )
    return tuple(words), tuple(dict.fromkeys(hosts))


def _ended(job: Mapping[str, Any]) -> rc.JobState:
    """How a job ended. A preemption looks like a qdel; SIGTERM may be either."""
    status = int(job['Exit_status']) if 'Exit_status' in job else None
    if job.get('substate') == _DELETED or status is None:
        return rc.JobState.CANCELLED
    return _ENDS.get(status) or (rc.JobState.BOOT_FAILED if status < 0 else rc.JobState.FAILED)


def parse_nodes(
    answer: str,
    queue: str,
    resources: Mapping[str, str],
    owners: Collection[tuple[str, str]] = (('', ''),),
    classes: Mapping[str, Mapping[str, str]] = {},
) -> tuple[rc.Nodes, ...]:
    """Hosts in the answer to :data:`NODES` that have these resources, or NotUnderstood; one is idle
    if all of its vnodes are. Features: values that are words, ``system=polaris``. ``owners``: see
    :func:`node_owners`; ``classes``: the resources of each node class.
    """
    hosts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    with rc.as_documented('pbsnodes'):
        words = {name for name, value in resources.items() if _amount(value) is None}
        for name, vnode in document(answer, 'pbsnodes')['nodes'].items():
            if not isinstance(vnode, dict) or not isinstance(vnode.get('state'), str):
                rc.warn_once(
                    f'Of the node {name} pbsnodes told {vnode!r}: it counts as unknown'[:300]
                )
                vnode = {'state': 'unknown', 'resources_available': {'ncpus': 1}}
            hosts[_host(name)].append(vnode)
            for resource, value in _available(vnode).items():
                if isinstance(value, str) and _amount(value) is None and resource not in _NAMES:
                    words.add(resource)
        for name, vnodes in hosts.items():
            # The natural vnode of a host that is divided into several has nothing to give.
            useful = [v for v in vnodes if _count(_available(v).get('ncpus', 0))] or vnodes
            has = [_available(vnode) for vnode in useful]
            owned = all((v.get('queue', ''), v.get('partition', '')) in owners for v in useful)
            if owned and all(_has(here, resources) for here in has):
                ngpus, ncpus, mem = (
                    sum(_amount(str(here.get(resource, 0))) or 0.0 for here in has)
                    for resource in ('ngpus', 'ncpus', 'mem')
                )
                # The first class whose resources each of the vnodes has.
                fit = (n for n, asked in classes.items() if all(_has(here, asked) for here in has))
                node_class = next(fit, '')
                features = {
                    f'{word}={value}'.lower()
                    for word in words
                    for here in has
                    for value in str(here.get(word, False)).split(',')
                }
                state, sizes = _node_state(useful), (int(ngpus), int(ncpus), mem // 2**28 * 256)
                alike[state, tuple(sorted(features)), node_class, *sizes].append(name)
    return tuple(
        rc.Nodes(queue, tuple(names), state, '', features, gpus, None, node_class, cpus, memory)
        for (state, features, node_class, gpus, cpus, memory), names in alike.items()
    )


def _available(vnode: Mapping[str, Any]) -> Mapping[str, Any]:
    here: Mapping[str, Any] = vnode.get('resources_available') or {}
    return here


# Of the attributes of a vnode (man pbs_node_attributes), those that keep blocks from a free one: it
# takes no job, or none of several nodes. Hooks say in a job's comment that they refused it.
_NO_JOBS = ('max_running', 'max_user_run', 'max_group_run')


def _node_state(vnodes: list[Mapping[str, Any]]) -> str:
    states = {word.strip().lower() for vnode in vnodes for word in vnode['state'].split(',')}
    for vnode in vnodes:
        if any(str(vnode.get(limit, '')) == '0' for limit in _NO_JOBS):
            states.add('offline')
        elif not _count(_available(vnode).get('ncpus', 0)):
            states.add('unknown')  # no job gets a CPU of it
        elif str(vnode.get('no_multinode_jobs', '')).lower() in ('true', '1'):
            states.add('single')
    if states != {'free'}:
        return '+'.join(sorted(states - {'free'}))
    # A free vnode may run jobs that leave room for others.
    named = any(vnode.get('jobs') for vnode in vnodes)
    given = any(_count((v.get('resources_assigned') or {}).get('ncpus', 0)) for v in vnodes)
    return 'mixed' if named or given else 'idle'


def _has(available: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    for name, value in wanted.items():
        here = str(available.get(name, 'False'))  # as a boolean that a node does not have
        if (least := _amount(value)) is not None:
            if (_amount(here) or 0.0) < least:
                return False
        elif value.lower() not in here.lower().split(','):
            return False
    return True


def _amount(value: str) -> float | None:
    """A number, or a size such as ``24684084kb`` in bytes; None if it is neither."""
    found = _SIZE.fullmatch(value)
    if found is None:
        return None
    words = 8.0 if found[3] in ('w', 'W') else 1.0
    return float(found[1]) * words * 1024.0 ** ' kmgtp'.index(found[2].lower() or ' ')


def node_owners(name: str, queues: Mapping[str, Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """The nodes that a queue's jobs can get: the queue to which they belong (``''``: to none), and
    the scheduler's partition. A queue with nodes of its own uses no others.
    """
    routes = str(queues[name].get('route_destinations', '')).split(',')
    ends = {end: queues[end] for end in routes if end in queues} or {name: queues[name]}
    return frozenset(
        (end if q.get('hasnodes') == 'True' else '', str(q.get('partition', '')))
        for end, q in ends.items()
    )


def parse_queues(answer: str) -> dict[str, dict[str, Any]]:
    """Queues in the answer to :data:`QUEUES`, as they stand there. May raise NotUnderstood."""
    queues = document(answer, 'qstat -Q', joined=True).get('Queue')
    if not isinstance(queues, dict) or not all(isinstance(q, dict) for q in queues.values()):
        raise rc.NotUnderstood('the document of qstat -Q has no Queue')
    return queues


def is_off(attribute: str, answer: str) -> bool:
    """Whether the server says so in the answer to :data:`SERVER`; one that cannot be read: no."""
    return re.search(rf'"{attribute}":\s*"?False', answer) is not None


def queue_ranks(queues: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {name: _count(queue.get('Priority', 0)) for name, queue in queues.items()}


def limits(name: str, queue: Mapping[str, Any]) -> rc.Partition:
    """What a queue allows; one that does not start jobs is not up. May raise NotUnderstood."""
    least, most = (queue.get(f'resources_{what}') or {} for what in ('min', 'max'))
    with rc.as_documented(f'qstat -Q about {name}'):
        queued = str(queue.get('max_queued', ''))
        waiting = map(int, re.findall(r'[uo]:PBS_(?:GENERIC|ALL)=(\d+)', queued))
        return rc.Partition(
            name,
            queue.get('started', 'True') == 'True',
            rc.seconds_of(most['walltime']) if 'walltime' in most else None,
            int(least.get('nodect', 0)),
            int(most['nodect']) if 'nodect' in most else None,
            shortest_s=rc.seconds_of(least.get('walltime', 0)),
            most_waiting=min(waiting, default=None),
        )


def parse_reservations(answer: str) -> tuple[rc.NodeReservation, ...]:
    """Those with nodes, and next ones of those that recur; for ever if times are unreadable."""
    found = []
    answer = rc.after_banner(answer, 'pbs_rstat', 'Resv ID: ')
    for text in re.split(r'^Resv ID: ', answer, flags=re.MULTILINE)[1:]:
        name, _, rest = text.partition('\n')
        fields = dict(re.findall(r'^\s*(\w+) = (.*)$', rest.replace('\n\t', ''), re.MULTILINE))
        start_s, end_s = 0.0, math.inf
        later: tuple[float, ...] = ()
        try:
            start_s, end_s = _times(fields['reserve_start'])[0], _times(fields['reserve_end'])[1]
            later = later_starts(fields, start_s)
        except (KeyError, ValueError, OverflowError):
            rc.warn_once(f'A reservation of PBS has no times that can be read: {text[:200]!r}')
            end_s = math.inf
        if nodes := hosts_of(fields.get('resv_nodes', '')):
            ends = ((at, at + end_s - start_s) for at in (start_s, *later))
            found += [rc.NodeReservation(name.strip(), *times, nodes) for times in ends]
    return tuple(found)


def _times(text: str | float) -> tuple[float, float]:
    """A time as PBS writes it, in this computer's time zone, or in seconds since the epoch: twice,
    and an hour apart where daylight saving ends, as it may then be either.
    """
    if isinstance(text, int | float) or text.isdigit():
        return float(text), float(text)
    return rc.time_of(text), rc.time_of(text, fold=1)


def hosts_of(exec_vnode: str) -> tuple[str, ...]:
    """Hosts in ``(x1:ncpus=64+x2[0]:ncpus=32)+(x3:ncpus=64)``, each once."""
    vnodes = (part.strip('()').split(':')[0] for part in exec_vnode.split('+'))
    return tuple(dict.fromkeys(_host(vnode) for vnode in vnodes if vnode))


def _host(vnode: str) -> str:
    """PBS names the vnodes of a host that is divided ``host[0]``, ``host[1]``."""
    return vnode.split('[')[0]


def _count(value: str | float) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
