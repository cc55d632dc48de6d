"""A real Slurm cluster on this computer, for tests marked ``slurm``.

It is started for the first test that needs it and stopped after the last one. All its files are in
one folder under /tmp.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.alone import alone
from tests.support.programs import run_to_end
from tests.support.waiting import LIMIT_S, looks

PROGRAM = Path(__file__).with_name('slurm-cluster')
NODES = 4
START_S = 120.0  # it starts in a fraction of a second
SBIN = '/usr/sbin:/sbin'


class Cluster:
    """One running cluster; ``node01`` to ``node04``, partitions batch, debug, scavenger and
    requeue.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / 'slurm.conf'

    def control(
        self, *arguments: str, timeout_s: float = LIMIT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the cluster's own programs."""
        # Daemons belong to the whole session, so they must not carry the mark of a test's own
        # processes.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(('FREETRAIN_TEST', 'SLURM_', 'SBATCH_'))
        }
        return subprocess.run(
            [str(PROGRAM), *arguments],
            env={**kept, 'SLURM_CLUSTER_DIR': str(self.folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(self, *command: str) -> str:
        """Run a Slurm command; return its output."""
        done = run_to_end(command, cwd=self.folder, more_env={'SLURM_CONF': str(self.conf)})
        assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'
        return done.stdout

    def submit(self, *options: str, seconds: float | str = 600) -> str:
        """Submit an ordinary job of another user, on whole nodes, that takes so many seconds, or as
        many as a shell finds; return its id.
        """
        return self.run(
            'sbatch',
            '--parsable',
            '--exclusive',
            '--output=/dev/null',
            *options,
            f'--wrap=exec sleep {seconds}',
        ).strip()

    def state(self, job_id: str) -> str:
        """Slurm's name of a job's state; empty if Slurm does not know the job."""
        return self.run(
            'squeue', '--noheader', '--all', '--states=all', f'--jobs={job_id}', '--format=%T'
        ).strip()

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        for _ in looks(limit_s):
            if condition():
                return
        raise AssertionError(
            f'did not come true within {limit_s} '
            f's\n{self.run("squeue", "-a")}{self.run("sinfo", "-a")}'
        )

    def scheduler(self) -> int:
        """Process id of slurmctld."""
        return int((self.folder / 'run' / 'slurmctld.pid').read_text())

    def stop_scheduler(self) -> None:
        """Stop it gracefully: when killed, it forgets the jobs of its last seconds."""
        pid = self.scheduler()
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + LIMIT_S
        while Path(f'/proc/{pid}').exists():
            assert time.monotonic() < end
            time.sleep(0.02)

    def start_scheduler(self) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith('FREETRAIN_TEST')
        }
        subprocess.run(
            ['slurmctld', '-f', str(self.conf)],
            check=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            env={**kept, 'PATH': f'{kept["PATH"]}:{SBIN}', 'SLURM_CONF': str(self.conf)},
            capture_output=True,
        )

    def kill_node(self, name: str) -> None:
        """Kill a node with all its processes, as in a crash."""
        done = self.control('kill-node', name, '--with-jobs')
        assert done.returncode == 0, done.stderr

    def start_node(self, name: str, idle: bool = True) -> None:
        """Start a node again; with ``idle``, wait until every node is idle."""
        done = self.control('start-node', name)
        assert done.returncode == 0, done.stderr
        if idle:
            self.wait(lambda: self.idle_nodes() == NODES)

    def resume(self) -> None:
        """Resume drained nodes, as an administrator does. Slurm may drain a node that crashed with
        its jobs.
        """
        for line in self.run(
            'sinfo',
            '--noheader',
            '--Node',
            '--partition=batch',
            '--states=drain,down',
            '--format=%N %E',
        ).splitlines():
            node, _, why = line.partition(' ')
            print(f'{node} was drained: {why}')
            self.run('scontrol', 'update', f'NodeName={node}', 'State=RESUME')

    def idle_nodes(self) -> int:
        return len(
            self.run(
                'sinfo', '--noheader', '--Node', '--partition=batch', '--states=idle', '--format=%N'
            ).split()
        )

    def clear(self) -> None:
        """Remove all jobs and reservations; wait until every node is idle."""
        if jobs := self.run('squeue', '--noheader', '--all', '--format=%A').split():
            self.run('scancel', '--quiet', *jobs)

        def empty() -> bool:
            self.resume()
            return (
                not self.run('squeue', '--noheader', '--all').split() and self.idle_nodes() == NODES
            )

        self.wait(empty)


@contextmanager
def running_cluster(nodes: int = NODES) -> Iterator[Cluster]:
    """A new cluster."""
    # Sockets need short paths, so pytest's own folder cannot be used.
    folder = Path(tempfile.mkdtemp(prefix='ft-slurm-', dir='/tmp'))
    cluster = Cluster(folder)
    try:
        # Each cluster looks for free ports first.
        with alone():
            done = cluster.control('up', str(nodes), timeout_s=START_S)
        assert done.returncode == 0, done.stderr
        yield cluster
    finally:
        stopped = cluster.control('down')
        assert stopped.returncode == 0, stopped.stderr
        shutil.rmtree(folder)


@pytest.fixture(scope='session')
def slurm_cluster() -> Iterator[Cluster]:
    """The session's cluster; skips the test if there is no Slurm."""
    path = f'{os.environ.get("PATH", "")}:{SBIN}'
    programs = ('munged', 'slurmctld', 'slurmd', 'sinfo', 'srun')
    if missing := [name for name in programs if shutil.which(name, path=path) is None]:
        pytest.skip(f'needs Slurm, which make system-packages installs: no {", ".join(missing)}')
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, empty and idle, with Slurm's commands configured for it."""
    monkeypatch.setenv('SLURM_CONF', str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.clear()
