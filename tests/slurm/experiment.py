"""The same mix of ordinary jobs on a fresh cluster of its own, with FreeTrain filling the holes or
without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

from parsl_freetrain.sites.slurm.hostlist import expand
from tests.slurm.mix import Mix
from tests.support.slurm import Cluster, running_cluster
from tests.support.waiting import LIMIT_S

TICK_S = 2.0  # bf_interval of the cluster
ROUNDING_S = 1.0  # Slurm tells times in whole seconds
KILL_WAIT_S = 5.0  # of the cluster
GRACE_S = 10.0  # of its partition for preemptible jobs

QUICK: dict[str, Any] = {
    'poll_s': 1.0,
    'waiting_poll_s': 0.5,
    'submit_every_s': 0.0,
    'start_s': 3.0,
    'ending_s': 3.0,
}
MODES: dict[str, dict[str, Any]] = {
    'backfill': {**QUICK, 'partition': 'batch', 'margin_s': 5.0},
    'preemptible': {**QUICK, 'partition': 'scavenger', 'mode': 'preemptible'},
}


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
        How often each of Slurm's commands was run.
    reserved
        Nodes that were set aside.
    """

    nodes: int
    ordinary: tuple[Ran, ...]
    blocks: tuple[Ran, ...] = ()
    node_s: dict[str, float] | None = None
    trained: tuple[tuple[str, float, float], ...] = ()
    commands: dict[str, int] = field(default_factory=dict)
    reserved: tuple[Ran, ...] = ()

    def document(self) -> dict[str, Any]:
        return asdict(self)


class Filler:
    """FreeTrain in a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path, settings: dict[str, Any]) -> None:
        self._errors = folder / 'errors'
        environment = {**os.environ, 'SLURM_CONF': str(cluster.conf), 'PYTHONPATH': os.getcwd()}
        with self._errors.open('w') as errors:
            self._process = subprocess.Popen(
                [sys.executable, '-m', 'tests.slurm.filler', str(folder), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == 'ready\n', self._errors.read_text()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write('\n')
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        said, _ = self._process.communicate(timeout=LIMIT_S)
        assert self._process.returncode == 0, self._errors.read_text()
        answer: dict[str, Any] = json.loads(said)
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def run(
    mix: Mix,
    nodes: int,
    folder: Path,
    filling: dict[str, Any] | None,
    ready: Barrier,
    blocks_first: bool,
) -> Outcome:
    """One run of the mix; ``filling`` are the settings of FreeTrain's site, None: without it. The
    mix begins when all runs are ready, and every node has a block; or, without ``blocks_first``,
    FreeTrain begins when all jobs have been submitted.
    """
    folder.mkdir(parents=True)
    with running_cluster(nodes) as cluster:
        filler = Filler(cluster, folder, filling) if filling is not None else None
        try:
            if filler is not None and blocks_first:
                filler.begin()
                cluster.wait(lambda: not cluster.idle_nodes())
            ready.wait(LIMIT_S)
            return _watched(cluster, mix, nodes, filler, blocks_first)
        except BaseException:
            ready.abort()
            raise
        finally:
            if filler is not None:
                filler.kill()


def _watched(
    cluster: Cluster, mix: Mix, nodes: int, filler: Filler | None, blocks_first: bool
) -> Outcome:
    zero = time.time()
    reserved: tuple[Ran, ...] = ()
    if mix.reserved is not None:
        aside = tuple(f'node{number:02d}' for number in range(1, mix.reserved.nodes + 1))
        at_s, names = mix.reserved.at_s, ','.join(aside)
        reserved = (Ran(at_s, at_s + 60 * mix.reserved.minutes, aside),)
        begin = time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(zero + at_s))
        cluster.run(
            *('scontrol', 'create', 'reservation', 'users=root', 'flags=maint,ignore_jobs'),
            *(f'starttime={begin}', f'duration={mix.reserved.minutes}', f'nodes={names}'),
        )
    ids: list[str] = []
    for job in mix.jobs:
        time.sleep(max(0.0, zero + job.at_s - time.time()))
        options = [f'--nodes={job.nodes}', f'--time={job.minutes}', '--job-name=ordinary']
        if job.tasks > 1:
            options.append(f'--array=0-{job.tasks - 1}')
        if job.after is not None:
            options.append(f'--dependency=afterany:{ids[job.after]}')
        ids.append(cluster.submit(*options, seconds=job.run_s))
    if filler is not None and not blocks_first:
        filler.begin()
    each = [
        f'{job_id}_{task}' if job.tasks > 1 else job_id
        for job_id, job in zip(ids, mix.jobs, strict=True)
        for task in range(job.tasks)
    ]

    def over() -> bool:
        time.sleep(1.0)  # when a job ended is what Slurm says, not when it was asked
        done = {row.job for row in rows(cluster) if row.state == 'COMPLETED'}
        return done.issuperset(each)

    cluster.wait(over, LIMIT_S)
    answer = filler.end() if filler is not None else {}
    ran = {
        row.job: Ran(row.start - zero, row.end - zero, row.names)
        for row in rows(cluster)
        if row.names and row.start and row.end
    }
    trained = tuple(
        (node, begun - zero, ended - zero) for node, begun, ended in answer.get('fragments', ())
    )
    return Outcome(
        nodes,
        tuple(ran[job] for job in each),
        tuple(ran[job] for job in ran.keys() - set(each)),
        answer.get('node_s'),
        trained,
        answer.get('commands', {}),
        reserved,
    )


@dataclass(frozen=True)
class Row:
    """A job as the queue shows it; times in seconds of ``time.time()``, 0 where there is none."""

    job: str
    start: int
    end: int
    state: str
    names: tuple[str, ...]


def rows(cluster: Cluster) -> list[Row]:
    asked = cluster.run(
        'env',
        'SLURM_TIME_FORMAT=%s',
        'squeue',
        '--noheader',
        '--all',
        '--states=all',
        '--format=%i|%S|%e|%T|%N',
    )
    fields = (line.split('|') for line in asked.splitlines())
    return [
        Row(job, _time(start), _time(end), state, expand(names))
        for job, start, end, state, names in fields
    ]


def _time(said: str) -> int:
    return int(said) if said.isdigit() else 0


def side_by_side(
    runs: Mapping[str, dict[str, Any] | None],
    mix: Mix,
    nodes: int,
    folder: Path,
    blocks_first: bool = True,
) -> dict[str, Outcome]:
    """Several runs of one mix at once, each on a cluster of its own: what slows one of them down
    slows down all. By name: the settings of FreeTrain's site, None: without it.
    """
    ready = Barrier(len(runs))
    with ThreadPoolExecutor(len(runs)) as pool:
        futures = {
            name: pool.submit(run, mix, nodes, folder / name, filling, ready, blocks_first)
            for name, filling in runs.items()
        }
        return {name: future.result() for name, future in futures.items()}
