"""The same mix of ordinary jobs on a real scheduler, with FreeTrain in the holes or without."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any, Protocol

from parsl_freetrain.sites.slurm.words import expand
from tests.slurm.mix import Mix, Ordinary, Reserved
from tests.support.slurm import Cluster
from tests.support.waiting import LIMIT_S

TICK_S = 2.0  # bf_interval of the cluster
KILL_WAIT_S = 5.0  # of the cluster

QUICK: dict[str, Any] = {'poll_s': 1.0, 'waiting_poll_s': 0.5, 'submit_every_s': 0.0}
QUICK |= {'start_s': 3.0, 'ending_s': 3.0}
# Trainers have one node each, and so have blocks: no other node is lost when one is given back.
_OFTEN = {**QUICK, 'poll_s': 0.25, 'waiting_poll_s': 0.25, 'margin_s': 3.0, 'most_nodes': 1}
MODES: dict[str, dict[str, Any]] = {
    'backfill': {**_OFTEN, 'partition': 'batch'},
    'preemptible': {**_OFTEN, 'partition': 'scavenger', 'mode': 'preemptible'},
}


Filling = dict[str, Any] | Sequence[dict[str, Any]] | None


@dataclass(frozen=True)
class Ran:
    """A job that ran; times in seconds since the first submission, ``names`` those of its nodes."""

    start_s: float
    end_s: float
    names: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes
    ----------
    ordinary
        The mix, in its own order.
    blocks
        FreeTrain's jobs.
    node_s
        The ledger's node-seconds by class, None without FreeTrain.
    trained
        Fragments as (node, first step, end), in the same seconds; each had one node.
    commands
        How often each of the scheduler's commands was run.
    reserved
        Nodes that were set aside.
    jobs
        The ids of the mix's jobs, in its order.
    needs
        When the journal says that jobs, by their ids, lacked nodes of blocks, in the same seconds.
    """

    nodes: int
    ordinary: tuple[Ran, ...]
    blocks: tuple[Ran, ...] = ()
    node_s: dict[str, float] | None = None
    trained: tuple[tuple[str, float, float], ...] = ()
    commands: dict[str, int] = field(default_factory=dict)
    reserved: tuple[Ran, ...] = ()
    jobs: tuple[str, ...] = ()
    needs: tuple[tuple[tuple[str, ...], float], ...] = ()

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A job as the queue shows it; times as of ``time.time()``, 0: none; names ``node01`` ..."""

    job: str
    start: float
    end: float
    completed: bool
    names: tuple[str, ...]


class Machine(Protocol):
    """Nodes of a real scheduler on which nothing else runs.

    Attributes
    ----------
    nodes
        Their number.
    site
        Name of the kind of site; see :func:`parsl_freetrain.sites.registry.site_types`.
    settings
        Of that site, beside those of the mode.
    address
        Where the nodes reach this computer; None: found by itself.
    environment
        With which the scheduler's commands reach it.
    """

    nodes: int
    site: str
    settings: dict[str, Any]
    address: str | None
    environment: dict[str, str]

    def reserve(self, reserved: Reserved, at: float) -> None:
        """Set the first nodes aside from ``at`` on, in seconds of ``time.time()``."""
        ...

    def submit(self, job: Ordinary, after: str | None) -> str:
        """Submit a job of another user, after another one has ended; return its id."""
        ...

    def tasks(self, job_id: str, job: Ordinary) -> list[str]:
        """The ids of all of a job's tasks."""
        ...

    def rows(self) -> list[Row]:
        """All jobs, also those that are over."""
        ...

    def known_as(self, host: str) -> str:
        """The name of a node in :meth:`rows`."""
        ...

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until this is true."""
        ...


class SlurmMachine:
    """A whole cluster."""

    site = 'slurm'
    settings: dict[str, Any] = {'interface': 'lo'}
    address: str | None = None

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self._cluster = cluster
        self.nodes = nodes
        self.environment = {'SLURM_CONF': str(cluster.conf)}
        self.wait = cluster.wait

    def reserve(self, reserved: Reserved, at: float) -> None:
        begin = time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(at))
        names = ','.join(first_names(reserved.nodes))
        self._cluster.run(
            *('scontrol', 'create', 'reservation', 'users=root', 'flags=maint,ignore_jobs'),
            *(f'starttime={begin}', f'duration={reserved.minutes}', f'nodes={names}'),
        )

    def submit(self, job: Ordinary, after: str | None) -> str:
        options = [f'--nodes={job.nodes}', f'--time={job.minutes}', '--job-name=ordinary']
        if job.tasks > 1:
            options.append(f'--array=0-{job.tasks - 1}')
        if after is not None:
            options.append(f'--dependency=afterany:{after}')
        if job.node:
            options.append(f'--nodelist={first_names(job.node)[-1]}')
        if job.cpus:
            options[0] = f'--ntasks={job.cpus}'
            return self._cluster.run(
                *('sbatch', '--parsable', '--output=/dev/null', *options),
                f'--wrap=exec sleep {job.run_s}',
            ).strip()
        return self._cluster.submit(*options, seconds=job.run_s)

    def tasks(self, job_id: str, job: Ordinary) -> list[str]:
        return [f'{job_id}_{task}' for task in range(job.tasks)] if job.tasks > 1 else [job_id]

    def rows(self) -> list[Row]:
        words = 'squeue', '--noheader', '--all', '--states=all', '--format=%i|%S|%e|%T|%N'
        asked = self._cluster.run('env', 'SLURM_TIME_FORMAT=%s', *words)
        fields = (line.split('|') for line in asked.splitlines())
        return [
            Row(job, _time(start), _time(end), state == 'COMPLETED', expand(names))
            for job, start, end, state, names in fields
        ]

    def known_as(self, host: str) -> str:
        return host


def _time(said: str) -> int:
    return int(said) if said.isdigit() else 0


def first_names(nodes: int) -> tuple[str, ...]:
    """Names of the first nodes."""
    return tuple(f'node{number:02d}' for number in range(1, nodes + 1))


class Filler:
    """FreeTrain in a process of its own."""

    def __init__(self, machine: Machine, folder: Path, settings: dict[str, Any]) -> None:
        self._errors = folder / 'errors'
        # Nodes have this program's Python, also where its environment is not activated.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ['PATH']))
        own = {'PATH': path, 'PYTHONPATH': os.getcwd()}
        environment = {**os.environ, **own, **machine.environment}
        site = {**machine.settings, **settings}
        with self._errors.open('w') as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, '-m', 'tests.slurm.filler', str(folder), machine.site),
                    *(json.dumps(site), *([machine.address] if machine.address else [])),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._expect('ready')

    def begin(self, nodes: int = 0, trainers: int = 8) -> None:
        """Ask for blocks; return when trainers run on so many nodes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f'{nodes} {trainers}\n')
        self._process.stdin.flush()
        self._expect('training')

    def _expect(self, line: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f'{line}\n', self._errors.read_text()

    def end(self) -> dict[str, Any]:
        said, _ = self._process.communicate(timeout=LIMIT_S)
        assert self._process.returncode == 0, self._errors.read_text()
        answer: dict[str, Any] = json.loads(said)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def run(
    mix: Mix, machine: Machine, folder: Path, filling: Filling, ready: Barrier, blocks_first: bool
) -> Outcome:
    """One run of the mix, or of several runs of FreeTrain, of which all but the last have two nodes
    each; ``filling``: the settings of its site, None: without it. The mix begins when every node
    trains; or, without ``blocks_first``, FreeTrain begins when all jobs are submitted.
    """
    folder.mkdir(parents=True)
    each = [] if filling is None else [filling] if isinstance(filling, dict) else [*filling]
    fillers: list[Filler] = []
    try:
        for number, settings in enumerate(each):
            (folder / str(number)).mkdir()
            fillers.append(Filler(machine, folder / str(number), settings))
            if blocks_first and number < len(each) - 1:
                fillers[-1].begin(2, 2)
            elif blocks_first:
                fillers[-1].begin(machine.nodes - 2 * number)
        ready.wait(LIMIT_S)
        return _watched(machine, mix, fillers, blocks_first)
    finally:
        for filler in fillers:
            filler.kill()


def _watched(machine: Machine, mix: Mix, fillers: list[Filler], blocks_first: bool) -> Outcome:
    zero = time.time()
    reserved: tuple[Ran, ...] = ()
    if mix.reserved is not None:
        at_s = mix.reserved.at_s
        aside = first_names(mix.reserved.nodes)
        reserved = (Ran(at_s, at_s + 60 * mix.reserved.minutes, aside),)
        machine.reserve(mix.reserved, zero + at_s)
    ids: list[str] = []
    for job in mix.jobs:
        time.sleep(max(0.0, zero + job.at_s - time.time()))
        ids.append(machine.submit(job, None if job.after is None else ids[job.after]))
    for filler in () if blocks_first else fillers:
        filler.begin()
    each = [t for job_id, j in zip(ids, mix.jobs, strict=True) for t in machine.tasks(job_id, j)]

    def over() -> bool:
        time.sleep(2.0)  # when a job ended is what the scheduler says, not when it was asked
        return {row.job for row in machine.rows() if row.completed}.issuperset(each)

    machine.wait(over, LIMIT_S)
    answers = [filler.end() for filler in fillers]
    rows = [row for row in machine.rows() if row.names and row.start and row.end]
    ran = {row.job: Ran(row.start - zero, row.end - zero, row.names) for row in rows}
    fragments = [fragment for answer in answers for fragment in answer['fragments']]
    trained = tuple((machine.known_as(n), begun - zero, end - zero) for n, begun, end in fragments)
    node_s: Counter[str] = Counter()
    commands: Counter[str] = Counter()
    for answer in answers:
        node_s.update(answer['node_s'])
        commands.update(answer['commands'])
    return Outcome(
        machine.nodes,
        tuple(ran[job] for job in each),
        tuple(ran[job] for job in ran.keys() - set(each)),
        dict(node_s) if answers else None,
        trained,
        dict(commands),
        reserved,
        tuple(each),
        tuple((tuple(jobs), at - zero) for answer in answers for jobs, at in answer['needs']),
    )


@contextmanager
def own_cluster(name: str, nodes: int) -> Iterator[Machine]:
    """A Slurm cluster for one of several runs."""
    with Cluster.running(nodes, within='/tmp') as cluster:
        yield SlurmMachine(cluster, nodes)


def side_by_side(
    runs: Mapping[str, Filling],
    mix: Mix | Mapping[str, Mix],
    nodes: int,
    folder: Path,
    blocks_first: bool = True,
    machines: Callable[[str, int], AbstractContextManager[Machine]] = own_cluster,
) -> dict[str, Outcome]:
    """Several runs at once, each on nodes of its own: what slows one down slows down all."""
    ready = Barrier(len(runs))
    mixes = dict.fromkeys(runs, mix) if isinstance(mix, Mix) else mix

    def one(name: str) -> Outcome:
        try:
            with machines(name, nodes) as machine:
                return run(mixes[name], machine, folder / name, runs[name], ready, blocks_first)
        except BaseException:
            ready.abort()
            raise

    with ThreadPoolExecutor(len(runs)) as pool:
        futures = {name: pool.submit(one, name) for name in runs}
        return {name: future.result() for name, future in futures.items()}
