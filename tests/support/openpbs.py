"""A real OpenPBS server here (its ports are fixed: one at a time), for tests marked ``pbs``."""

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.training.process.node_agent import TEMPLATE_VARIABLE
from tests.support.programs import run_to_end
from tests.support.real_cluster import NODES, RealCluster, Shared

ADDRESS = '10.77.7.254'  # of this computer, as the nodes see it
PREFIX = Path(os.environ.get('PBS_CLUSTER_PREFIX', '/opt/pbs'))
# Quicker than a real machine would be, in seconds.
QUICK = {
    'PBS_CLUSTER_CYCLE': '1',
    'PBS_CLUSTER_KILL_DELAY': '2',
    'PBS_CLUSTER_FAIL_REQUEUE': '3',
    'PBS_CLUSTER_GPUS': '2',
}


class PbsCluster(RealCluster):
    """One running server, with the queues that :data:`program` says."""

    program = Path(__file__).with_name('pbs-cluster')
    variable = 'PBS_CLUSTER_DIR'
    hidden = ('PBS_CONF',)
    settings = QUICK

    @property
    def environment(self) -> dict[str, str]:
        path = f'{PREFIX}/bin:{os.environ["PATH"]}'
        return {'PBS_CONF_FILE': str(self.folder / 'pbs.conf'), 'PATH': path}

    def all(self) -> str:
        """With the logs, which go with the server; repeated lines are at the beginning, too."""
        said = [line for job in self.run('qselect').split() for line in self.log_of(job)[:200]]
        return self.run('qstat', '-ans1') + self.run('pbsnodes', '-aS') + '\n'.join(said)

    def manage(self, *lines: str) -> None:
        """Change the server's settings, as an administrator does."""
        for line in lines:
            self.run('qmgr', '-c', line)

    def submit(
        self,
        nodes: int = 1,
        *options: str,
        walltime_s: int = 600,
        seconds: float = 600,
        system: str = '',
    ) -> str:
        """Submit an ordinary job of another user, on whole nodes; return its id."""
        where = f'-lselect={nodes}:ncpus=4' + (f':system={system}' if system else '')
        how = where, '-lplace=scatter:excl', f'-lwalltime={walltime_s}', '-Nordinary', *options
        words = '-f', *how, '-o/dev/null', '-e/dev/null', '--', '/bin/sleep', f'{seconds:g}'
        return self.run('qsub', *words).strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """All that PBS says about a job; empty if it does not know it."""
        said = json.loads(self.run('qstat', '-x', '-f', '-F', 'json', job_id), strict=False)
        found: dict[str, Any] = said.get('Jobs', {}).get(job_id, {})
        return found

    def state(self, job_id: str) -> str:
        """PBS's letter of a job's state; empty if it does not know it."""
        return str(self.job(job_id).get('job_state', ''))

    def nodes_of(self, job_id: str) -> set[str]:
        """The nodes that a job has, or had last."""
        hosts = str(self.job(job_id).get('exec_host', ''))
        return {part.split('/')[0] for part in hosts.split('+') if part}

    def free(self) -> int:
        """The number of free nodes."""
        return sum(line.split()[1] == 'free' for line in self.run('pbsnodes', '-aS').splitlines())

    def processes(self, node: str) -> list[str]:
        """The command lines of what runs on a node beside PBS's own."""
        lines = self.control('on', node, 'ps', '-eo', 'stat,args').splitlines()[1:]
        own = ('pbs_mom', 'pbs-cluster', 'sleep 3600', 'ps -eo')
        return [s for s in lines if not s.startswith('Z') and not any(w in s for w in own)]

    def log_of(self, job_id: str) -> list[str]:
        """What the server, and then each node's mom, have logged of a job."""
        logs = [*self.folder.glob('home/server_logs/*'), *self.folder.glob('nodes/*/mom_logs/*')]
        texts = [(log.parts[-3], log.read_text(errors='replace')) for log in sorted(logs)]
        return [
            f'{n}: {line}'
            for n, text in texts
            for line in text.splitlines()
            if f';{job_id};' in line
        ]

    @contextmanager
    def down(self) -> Iterator[None]:
        """The server is stopped; jobs go on."""
        self.control('stop-server', 'quick')
        try:
            yield
        finally:
            self.control('start-server')

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The server hangs: it takes connections, and answers nothing."""
        server = int((self.folder / 'home' / 'server_priv' / 'server.lock').read_text())
        os.kill(server, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server, signal.SIGCONT)

    @contextmanager
    def crashed(self, node: str) -> Iterator[None]:
        """A node is gone at once, with all of its processes; at the end it comes back."""
        self.control('crash', node)
        try:
            yield
        finally:
            self.control('boot', node)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Nodes reach this computer, and none of them another one."""

        def isolate(state: str) -> None:
            for n in range(1, NODES + 1):
                words = f'ip link set pbs10777.{n} type bridge_slave isolated {state}'
                subprocess.run(words.split(), check=True)

        isolate('on')
        try:
            yield
        finally:
            isolate('off')

    @contextmanager
    def templates(self) -> Iterator[str]:
        """A template with torch on each node for all blocks; yields the command that finds it."""
        name = f'node-{secrets.token_hex(8)}'
        template = (
            'import os, sys; from parsl_freetrain.training.process.fork_client import ForkClient; '
            f'ForkClient.start_template({name!r}, os.getpid(), os.devnull); print(flush=True); '
            'sys.stdin.read()'
        )
        kept = {name: os.environ[name] for name in ('PATH', 'HOME')}
        started = [
            subprocess.Popen(
                [
                    str(self.program),
                    'on',
                    f'node{number:02d}',
                    sys.executable,
                    '-P',
                    '-c',
                    template,
                ],
                env={
                    **kept,
                    'OPENBLAS_NUM_THREADS': '1',
                    'OMP_NUM_THREADS': '1',
                    'PBS_CLUSTER_DIR': str(self.folder),
                    'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(1, NODES + 1)
        ]
        try:
            for process in started:  # a block that found none would import torch by itself
                assert process.stdout is not None and process.stdout.readline()
            # PBS sets the number of threads for its jobs, and a template has to have the same.
            yield f'export {TEMPLATE_VARIABLE}={name} OMP_NUM_THREADS=1'
        finally:
            for process in started:
                process.communicate()

    def clear(self) -> None:
        """Remove all jobs and reservations; wait until nodes are free and empty. One given up by
        the server (``mcast failed``) is started anew: its mom believes to be connected.
        """
        lines = self.run('qstat').splitlines()[2:]
        if jobs := [line.split()[0] for line in lines]:
            run_to_end(['qdel', '-W', 'force', *jobs], more_env=self.environment)

        def empty() -> bool:
            if self.run('qstat').strip():
                return False
            for line in self.run('pbsnodes', '-aS').splitlines():
                if 'mcast failed' in line:
                    self.control('crash', line.split()[0])
                    self.control('boot', line.split()[0])
            return self.free() == NODES

        self.wait(empty)


@contextmanager
def running_pbs(nodes: int = NODES, **settings: str) -> Iterator[PbsCluster]:
    """A new server. There is one at a time: the shared one is stopped first."""
    SHARED.end()
    with Path(tempfile.gettempdir(), 'ft-openpbs.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # PBS refuses a folder under /tmp.
        with PbsCluster.running(nodes, within='/var/lib', **settings) as cluster:
            yield cluster


SHARED = Shared(running_pbs)


def why_not() -> str:
    """Why there can be no server here; empty if there can."""
    if not (PREFIX / 'sbin' / 'pbs_server.bin').exists():
        return f'needs OpenPBS, which make system-packages unpacks: there is none in {PREFIX}'
    if os.getuid() != 0:
        return 'needs OpenPBS, whose daemons and network namespaces only root can start'
    return ''


@pytest.fixture
def openpbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[PbsCluster]:
    """The shared server, without jobs; skips the test where there can be none."""
    if why := why_not():
        pytest.skip(why)
    server = SHARED.begin()
    monkeypatch.setenv('PBS_CONF_FILE', str(server.folder / 'pbs.conf'))
    monkeypatch.setenv('PATH', f'{PREFIX}/bin', prepend=os.pathsep)
    yield server
    server.clear()
