"""What schedulers say, as frozen records; times in seconds of ``time.time()``."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_tz
from enum import StrEnum
from functools import cache
from typing import Any

from parsl_freetrain.core.model.errors import FreeTrainError

logger = logging.getLogger(__name__)


class JobState(StrEnum):
    """Where a job stands. PENDING waits for nodes, HELD for something else; STARTING has nodes that
    are made ready; ENDING still holds them. DEADLINE was dropped because it could not end in time.
    TERMINATED ended by SIGTERM, FAILED by another error. UNKNOWN never means that a job is over.
    """

    PENDING = 'PENDING'
    HELD = 'HELD'
    STARTING = 'STARTING'
    RUNNING = 'RUNNING'
    SUSPENDED = 'SUSPENDED'
    ENDING = 'ENDING'
    COMPLETED = 'COMPLETED'
    FAILED = 'FAILED'
    TERMINATED = 'TERMINATED'
    TIMED_OUT = 'TIMED_OUT'
    PREEMPTED = 'PREEMPTED'
    CANCELLED = 'CANCELLED'
    DEADLINE = 'DEADLINE'
    NODE_FAILED = 'NODE_FAILED'
    BOOT_FAILED = 'BOOT_FAILED'
    OUT_OF_MEMORY = 'OUT_OF_MEMORY'
    UNKNOWN = 'UNKNOWN'

    @property
    def is_over(self) -> bool:
        """Whether the job has ended for good and its nodes are free."""
        return self not in _GOING_ON


_GOING_ON = frozenset(
    (
        *(JobState.PENDING, JobState.HELD, JobState.STARTING, JobState.RUNNING),
        *(JobState.SUSPENDED, JobState.ENDING, JobState.UNKNOWN),
    )
)


@dataclass(frozen=True)
class BatchJob:
    job_id: str
    state: JobState
    partition: str
    nodes: int  #: how many it has or asks for
    #: start_s, end_s: when it started or is expected to, and ends at the latest; None: the
    #: scheduler does not know
    start_s: float | None = None
    end_s: float | None = None
    #: the nodes that the scheduler means to give it while it is pending; empty: no plan
    planned: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  #: the nodes it has; empty while pending
    user: str = ''
    reason: str = ''  #: why it waits, in the scheduler's words
    name: str = ''
    restarts: int = 0  #: how often it was requeued; 0 where the form of the answer does not tell
    limit_s: float | None = None  #: the walltime that it asks for; None: unknown
    priority: float = 0.0  #: of two jobs with equal ones, the earlier in the answer is first
    blocked: bool = False  #: it waits for what nodes would not change: another job, a date, a limit
    #: the nodes that it asks for by name: it gets all of them, and others if it wants more
    only: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  #: the nodes that it does not want
    #: with ``gpus``: what each of its nodes must have; see :meth:`Nodes.have`
    features: tuple[frozenset[str], ...] = ()
    gpus: int = 0
    tasks: int = 1  #: jobs alike that a pending job array stands for
    cpus: int = 0  #: on all of its nodes together; 0: it gets whole nodes, or that is not known
    #: step, least_nodes: CPUs on each node are a multiple of this, and nodes at least so many,
    #: where it shares them; 0: as :attr:`nodes`
    step: int = 1
    least_nodes: int = 0
    #: memory, memory_per_cpu: of each node at least, and at most for each CPU where that may be
    #: meant, in MiB; 0: none
    memory: float = 0.0
    memory_per_cpu: float = 0.0


USABLE = ('idle', 'planned')
SET_ASIDE = ('maint', 'resv', 'reserved')
# Parts of the states, in the words of any scheduler, of nodes that can run nothing.
_BROKEN = (
    *SET_ASIDE,
    *('down', 'drain', 'offline', 'fail', 'stale', 'unk', 'power', 'boot', 'provision', 'error'),
    *('inval', 'future', 'sleep', 'unresolv', 'initial'),
)
# -: planned, which older versions mark instead of naming the state; +: a job still completes.
_HARMLESS_MARKS = '-+'


@dataclass(frozen=True)
class Nodes:
    partition: str
    names: tuple[str, ...]
    #: The scheduler's word in lower case. Blocks can use nodes that are ``'idle'`` or ``'planned'``
    #: (idle, but meant for a waiting job), and no others.
    state: str
    #: What Slurm writes behind the state: ``'*'`` does not answer, ``'~'`` powered down, ``'$'``
    #: maintenance, and so on; ``'?'`` for each such thing in a document. A node with marks other
    #: than ``'-'`` and ``'+'`` is not used.
    marks: str = ''
    features: tuple[str, ...] = ()
    gpus: int = 0  #: on each
    #: when the scheduler means to need them; None: it says so only of its jobs
    until_s: float | None = None
    node_class: str = ''  #: which of the site config's node classes; empty: none
    cpus: int = 0  #: cpus, memory (MiB): on each; 0: unknown
    memory: float = 0.0

    @property
    def mixed(self) -> bool:
        """Whether some of each is free while jobs have the rest."""
        return 'mix' in self.state

    @property
    def usable(self) -> bool:
        return self.state in USABLE and not self.marked

    @property
    def broken(self) -> bool:
        """Whether they can run nothing, also when their jobs have ended."""
        return self.marked or any(word in self.state for word in _BROKEN)

    @property
    def drained(self) -> bool:
        return 'drain' in self.state or 'offline' in self.state

    @property
    def marked(self) -> bool:
        """Whether something is wrong with them beside their state."""
        return bool(self.marks.strip(_HARMLESS_MARKS))

    def have(self, features: tuple[frozenset[str], ...], gpus: int) -> bool:
        """Whether each has all features of one of these sets, if there are any, and the GPUs."""
        here = set(self.features)
        return self.gpus >= gpus and (not features or any(each <= here for each in features))


@dataclass(frozen=True)
class NodeReservation:
    """Nodes set aside for a time; ``everywhere``: their names were not readable."""

    name: str
    start_s: float
    end_s: float
    nodes: tuple[str, ...]
    everywhere: bool = False


@dataclass(frozen=True)
class Partition:
    name: str
    up: bool = True
    longest_s: float | None = None  #: its time limit; None: unlimited
    least_nodes: int = 0  #: least_nodes, most_nodes: of a job; most None: unlimited
    most_nodes: int | None = None
    preempt_mode: str = 'OFF'  #: ``'OFF'``, ``'CANCEL'``, ``'REQUEUE'``, ...
    grace_s: float = 0.0  #: what a preempted job gets before it is killed
    #: accounts, denied_accounts, qos: who may use it; empty: everybody
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    shortest_s: float = 0.0  #: the minimum walltime of a job
    most_waiting: int | None = None  #: of one user's jobs; None: unlimited
    tier: int = 0  #: jobs of a higher one go first, whatever their priority
    jobs_hidden: bool = False  #: whether users may not see the jobs of others

    @property
    def notes(self) -> frozenset[str]:
        """What keeps blocks from their nodes now, or others from getting theirs back."""
        stopped = 'starts no jobs now: it is stopped, inactive or drained'
        hidden = 'may hide the jobs of others: blocks cannot be given back for what is not seen'
        return frozenset(s for s, so in ((stopped, not self.up), (hidden, self.jobs_hidden)) if so)


class NotUnderstood(FreeTrainError, ValueError):
    """An answer that is not as documented."""


@cache
def warn_once(what: str) -> None:
    logger.warning(what)


def after_banner(answer: str, command: str, begin: str, none: str | None = '') -> str:
    """An answer from the first line on that begins with the pattern ``begin``: a wrapper or a login
    shell may print others before it. Empty if nothing was printed, or ``none`` at the end, as where
    there is nothing (None: there always is something). Raises NotUnderstood for another one.
    """
    if found := re.search(f'^(?:{begin})', answer, re.MULTILINE):
        return answer[found.start() :]
    said = answer.strip()
    if none is not None and (not said or (none and said.endswith(none))):
        return ''
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ['nothing']
    raise NotUnderstood(f'{command} answered {lines[0][:200]!r}, not in the format asked for')


@contextmanager
def as_documented(command: str, answer: object = '') -> Iterator[None]:
    """Raise NotUnderstood for whatever is missing in a command's answer, or is of another kind."""
    try:
        yield
    except NotUnderstood:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        said = f' {str(answer)[:300]}' if answer else ''
        raise NotUnderstood(
            f'the answer of {command}{said} is not as documented: {type(error).__name__} {error}'
        ) from error


def all_of(
    told: Iterable[tuple[str, Any]], read: Callable[[str, Any], BatchJob], command: str
) -> tuple[BatchJob, ...]:
    """The jobs, by their ids and what is told of them. Nothing is known of one that cannot be read,
    or is there twice. Raises NotUnderstood if none can be read.
    """
    found, odd = list[BatchJob](), list[NotUnderstood]()
    for job_id, said in told:
        try:
            with as_documented(command, said):
                found.append(read(job_id, said))
        except NotUnderstood as error:
            logger.info('Nothing is known of job %s: %s', job_id, error)
            found.append(BatchJob(job_id, JobState.UNKNOWN, '', 1))
            odd.append(error)
    if odd and len(odd) == len(found):
        raise NotUnderstood(f'no job can be read in what {command} answered: {odd[0]}'[:400])
    times = Counter(job.job_id for job in found)
    return tuple(
        job if times[job.job_id] == 1 else replace(job, state=JobState.UNKNOWN) for job in found
    )


def time_of(text: str, fold: int = 0) -> float:
    """Of ``Mon Nov 13 08:00:00 2017 +0000 (UTC)``, whatever the locale is; without a zone it is
    this computer's. ``fold`` 1: the later time, in an hour that clocks pass twice.
    """
    if (found := parsedate_tz(text)) is None:
        raise ValueError(f'{text!r} is no time')
    zone = timezone(timedelta(seconds=found[9] or 0)) if len(text.split()) > 5 else None
    return datetime(*found[:6], tzinfo=zone, fold=fold).timestamp()


def seconds_of(duration: str | float) -> float:
    """Seconds of ``HH:MM:SS``, ``MM:SS`` or a number. Raises ValueError if it is neither."""
    total = 0.0
    for part in str(duration).split(':'):
        total = 60 * total + float(part)
    return total
