"""A real Slurm cluster on this computer, for tests marked ``slurm``.

It is started for the first test that needs it and stopped after the last. Everything of it lies in one folder under /tmp.
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

PROGRAM = Path(__file__).with_name('slurm-cluster')
NODES = 4
# Installing packages may take minutes on a slow network; a cluster of four nodes is up in a fraction of a second.
INSTALL_S = 600.0
LIMIT_S = 60.0
SBIN = '/usr/sbin:/sbin'


class Cluster:
    """One running cluster; ``node01`` to ``node04``, partitions batch, debug, scavenger and requeue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / 'slurm.conf'

    def control(self, *arguments: str, timeout_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run the cluster's own program."""
        # Daemons belong to the whole session: they must not carry the mark by which a test's own processes are known.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(('FREETRAIN_TEST', 'SLURM_', 'SBATCH_'))}
        return subprocess.run([str(PROGRAM), *arguments], env={**kept, 'SLURM_CLUSTER_DIR': str(self.folder)}, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=timeout_s, check=False)

    def run(self, *command: str) -> str:
        """A command of Slurm's; what it says."""
        done = subprocess.run(command, env={**os.environ, 'SLURM_CONF': str(self.conf)}, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=LIMIT_S, check=False, cwd=self.folder)
        assert done.returncode == 0, f'{command}: {done.stdout}{done.stderr}'
        return done.stdout

    def submit(self, *options: str, seconds: float = 600) -> str:
        """An ordinary job of somebody else, on whole nodes; its id."""
        return self.run('sbatch', '--parsable', '--exclusive', '--output=/dev/null', *options, f'--wrap=exec sleep {seconds:g}').strip()

    def state(self, job_id: str) -> str:
        """Slurm's word for a job's state, an empty text if it does not know it."""
        return self.run('squeue', '--noheader', '--all', '--states=all', f'--jobs={job_id}', '--format=%T').strip()

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f'did not come true within {limit_s} s\n{self.run("squeue", "-a")}{self.run("sinfo", "-a")}'
            time.sleep(0.05)

    def scheduler(self) -> int:
        """Process id of slurmctld."""
        return int((self.folder / 'run' / 'slurmctld.pid').read_text())

    def stop_scheduler(self) -> None:
        """In order: one that is killed forgets the jobs of its last seconds."""
        pid = self.scheduler()
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + LIMIT_S
        while Path(f'/proc/{pid}').exists():
            assert time.monotonic() < end
            time.sleep(0.02)

    def start_scheduler(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith('FREETRAIN_TEST')}
        subprocess.run(['slurmctld', '-f', str(self.conf)], check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
                       env={**kept, 'PATH': f'{kept["PATH"]}:{SBIN}', 'SLURM_CONF': str(self.conf)}, capture_output=True)

    def kill_node(self, name: str) -> None:
        """As if it had crashed, with all that runs on it."""
        done = self.control('kill-node', name, '--with-jobs')
        assert done.returncode == 0, done.stderr

    def start_node(self, name: str, idle: bool = True) -> None:
        """Start it again, and wait until every node is ``idle``, where there are no jobs."""
        done = self.control('start-node', name)
        assert done.returncode == 0, done.stderr
        if idle:
            self.wait(lambda: self.idle_nodes() == NODES)

    def resume(self) -> None:
        """What an administrator does with nodes that Slurm has drained, as it may one whose jobs have crashed with it."""
        for line in self.run('sinfo', '--noheader', '--Node', '--partition=batch', '--states=drain,down', '--format=%N %E').splitlines():
            node, _, why = line.partition(' ')
            print(f'{node} was drained: {why}')
            self.run('scontrol', 'update', f'NodeName={node}', 'State=RESUME')

    def idle_nodes(self) -> int:
        return len(self.run('sinfo', '--noheader', '--Node', '--partition=batch', '--states=idle', '--format=%N').split())

    def clear(self) -> None:
        """No jobs and no reservations; every node idle."""
        if jobs := self.run('squeue', '--noheader', '--all', '--format=%A').split():
            self.run('scancel', '--quiet', *jobs)

        def empty() -> bool:
            self.resume()
            return not self.run('squeue', '--noheader', '--all').split() and self.idle_nodes() == NODES

        self.wait(empty)


@contextmanager
def running_cluster(nodes: int = NODES) -> Iterator[Cluster]:
    """A cluster of its own; what is missing of Slurm's packages is installed first."""
    # Sockets need short paths: not in pytest's own folder.
    folder = Path(tempfile.mkdtemp(prefix='ft-slurm-', dir='/tmp'))
    cluster = Cluster(folder)
    try:
        # Each looks for free ports first.
        with alone():
            done = cluster.control('up', str(nodes), timeout_s=INSTALL_S)
        assert done.returncode == 0, done.stderr
        yield cluster
    finally:
        stopped = cluster.control('down', timeout_s=120)
        assert stopped.returncode == 0, stopped.stderr
        shutil.rmtree(folder)


@pytest.fixture(scope='session')
def slurm_cluster() -> Iterator[Cluster]:
    """The session's cluster; skips where Slurm is not installed and cannot be."""
    path = os.environ.get('PATH', '')
    missing = [name for name in ('munged', 'slurmctld', 'slurmd', 'sinfo', 'srun') if shutil.which(name, path=f'{path}:{SBIN}') is None]
    if missing and (os.getuid() != 0 or shutil.which('apt-get') is None):
        pytest.skip(f'needs Slurm: {", ".join(missing)} not found, and only root on Debian can install them here')
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, empty and idle, as the one that Slurm's commands talk to."""
    monkeypatch.setenv('SLURM_CONF', str(slurm_cluster.conf))
    yield slurm_cluster
    slurm_cluster.clear()
