"""Groups of nodes of one real PBS server, by the resource ``system``, for runs side by side."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.slurm.experiment import QUICK, Machine, Row, first_names
from tests.slurm.mix import Ordinary, Reserved
from tests.support.openpbs import ADDRESS, PbsCluster, running_pbs

MODES: dict[str, dict[str, Any]] = {
    'backfill': {**QUICK, 'queue': 'batch', 'margin_s': 5.0},
    'preemptible': {**QUICK, 'queue': 'preemptable', 'mode': 'preemptible'},
}


class Group:
    """Some nodes of a server, which call each other ``node01`` and so on."""

    site = 'pbspro'
    address: str | None = ADDRESS

    def __init__(self, cluster: PbsCluster, name: str, hosts: tuple[str, ...]) -> None:
        self._cluster = cluster
        self._name = name
        self._hosts = dict(zip(hosts, first_names(len(hosts)), strict=True))
        self.nodes = len(hosts)
        self.settings: dict[str, Any] = {
            'node_resources': {'system': name},
            'worker_init': f'export PATH={Path(sys.executable).parent}:$PATH',
        }
        self.environment = cluster.environment
        self.wait = cluster.wait

    def reserve(self, reserved: Reserved, at: float) -> None:
        hosts = [host for host, name in self._hosts.items() if name in first_names(reserved.nodes)]
        self._cluster.run(
            *('pbs_rsub', '-R' + time.strftime('%Y%m%d%H%M.%S', time.localtime(at))),
            *(f'-D{60 * reserved.minutes}', '--hosts', *hosts),
        )

    def submit(self, job: Ordinary, after: str | None) -> str:
        options = [] if job.tasks == 1 else [f'-J0-{job.tasks - 1}']
        if after is not None:
            options.append(f'-Wdepend=afterany:{after}')
        return self._cluster.submit(
            job.nodes, *options, walltime_s=60 * job.minutes, seconds=job.run_s, system=self._name
        )

    def tasks(self, job_id: str, job: Ordinary) -> list[str]:
        if job.tasks == 1:
            return [job_id]
        return [job_id.replace('[]', f'[{task}]') for task in range(job.tasks)]

    def rows(self) -> list[Row]:
        answer = self._cluster.run('qstat', '-x', '-t', '-f', '-F', 'json')
        found = json.loads(answer, strict=False).get('Jobs', {})
        self._release(found)
        rows = [self._row(job_id, job) for job_id, job in found.items()]
        return [row for row in rows if row.names]

    def _release(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        """PBS holds a job for ever if the one that it depends on ends while it is submitted."""
        for job_id, job in jobs.items():
            after = job.get('depend', '').removeprefix('afterany:').partition('@')[0]
            ended = jobs.get(after, {}).get('job_state') == 'F'
            ours = f':system={self._name} ' in job.get('Submit_arguments', '')
            if ours and ended and job['job_state'] == 'H':
                self._cluster.run('qrls', '-h', 's', job_id)

    def _row(self, job_id: str, job: Mapping[str, Any]) -> Row:
        hosts = {part.split('/')[0] for part in job.get('exec_host', '').split('+')}
        return Row(
            job_id,
            _time(job.get('stime', '')),
            _time(job.get('obittime', '')),
            job['job_state'] in 'FX' and job.get('Exit_status') == 0,
            tuple(sorted(self._hosts[host] for host in hosts & self._hosts.keys())),
        )

    def known_as(self, host: str) -> str:
        return self._hosts[host]


def _time(said: str) -> float:
    return time.mktime(time.strptime(said, '%a %b %d %H:%M:%S %Y')) if said else 0.0


@contextmanager
def groups(
    names: tuple[str, ...], nodes: int
) -> Iterator[Callable[[str, int], AbstractContextManager[Machine]]]:
    """A new server with a group of nodes for each name."""
    total = len(names) * nodes
    with running_pbs(total, PBS_CLUSTER_BACKFILL='100', PBS_CLUSTER_KILL_DELAY='2') as cluster:
        all_hosts = first_names(total)
        made: dict[str, Machine] = {}
        for place, name in enumerate(names):
            hosts = all_hosts[place * nodes : (place + 1) * nodes]
            word = f'resources_available.system = {name.replace(" ", "-")}'
            cluster.manage(*(f'set node {host} {word}' for host in hosts))
            made[name] = Group(cluster, name.replace(' ', '-'), hosts)

        @contextmanager
        def group(name: str, _: int) -> Iterator[Machine]:
            yield made[name]

        yield group
