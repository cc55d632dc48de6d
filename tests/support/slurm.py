"""A real Slurm cluster on this computer, for tests marked ``slurm``."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.real_cluster import NODES, RealCluster, Shared
from tests.support.waiting import LIMIT_S

SBIN = '/usr/sbin:/sbin'


class Cluster(RealCluster):
    """One running cluster, with the partitions batch, debug, scavenger and requeue."""

    program = Path(__file__).with_name('slurm-cluster')
    variable = 'SLURM_CLUSTER_DIR'
    hidden = 'SLURM_', 'SBATCH_'

    @property
    def conf(self) -> Path:
        return self.folder / 'slurm.conf'

    @property
    def environment(self) -> dict[str, str]:
        return {'SLURM_CONF': str(self.conf)}

    def all(self) -> str:
        return self.run('squeue', '-a') + self.run('sinfo', '-a')

    def submit(self, *options: str, seconds: float | str = 600) -> str:
        """Submit another user's job on whole nodes, for so many seconds; return its id."""
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
        kept = {n: v for n, v in os.environ.items() if not n.startswith('FREETRAIN_TEST')}
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
        self.control('kill-node', name, '--with-jobs')

    def start_node(self, name: str, idle: bool = True) -> None:
        """Start a node again; with ``idle``, wait until every node is idle."""
        self.control('start-node', name)
        if idle:
            self.wait(lambda: self.idle_nodes() == NODES)

    def resume(self) -> None:
        """Resume drained nodes: Slurm may drain a node that crashed with its jobs."""
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
        words = '--noheader', '--Node', '--partition=batch', '--states=idle', '--format=%N'
        return len(self.run('sinfo', *words).split())

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
def slurm_24_11(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> Iterator[None]:
    """A cluster with Slurm 24.11 in a root folder of its own, and its programs on the PATH."""
    support = Path(__file__).parent
    made = subprocess.run(
        [support / 'slurm24', 'make'], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f'no Slurm 24.11 here: {made.stderr[-200:]}')
    (programs := folder / 'bin').mkdir()
    cluster = f'/tmp/slurm24-{os.getpid()}'
    for name, value in {
        'SLURM_CLUSTER_DIR': cluster,
        'SLURM_CONF': f'{cluster}/slurm.conf',
        'PATH': f'{programs}:{os.environ["PATH"]}',
        **settings,
    }.items():
        monkeypatch.setenv(name, value)

    def call(*words: str) -> None:
        subprocess.run([support / 'slurm24', *words], check=True, timeout=300)

    call('programs', str(programs))
    try:
        call('slurm-cluster', 'up', '4')
        yield
    finally:
        call('slurm-cluster', 'down')
        shutil.rmtree(cluster)


SHARED = Shared(lambda: Cluster.running(within='/tmp'))


@pytest.fixture(scope='session')
def has_slurm() -> None:
    """Skips the test if there is no Slurm."""
    path = f'{os.environ.get("PATH", "")}:{SBIN}'
    programs = ('munged', 'slurmctld', 'slurmd', 'sinfo', 'srun')
    if missing := [name for name in programs if shutil.which(name, path=path) is None]:
        pytest.skip(f'needs Slurm, which make system-packages installs: no {", ".join(missing)}')


@pytest.fixture
def slurm(has_slurm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, empty and idle, with Slurm's commands configured for it."""
    cluster = SHARED.begin()
    monkeypatch.setenv('SLURM_CONF', str(cluster.conf))
    yield cluster
    cluster.clear()
