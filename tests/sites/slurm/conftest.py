"""What the tests on a real cluster share: a site that asks often, and blocks that are cancelled at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from parsl.jobs.states import JobStatus

from parsl_freetrain.core.words import BlockRequest
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.slurm import SlurmSite
from tests.support.slurm import Cluster

# In seconds; the cluster of the tests starts a job within some two.
QUICK = {'poll_s': 0.5, 'submit_every_s': 0.0, 'start_s': 3.0, 'margin_s': 2.0, 'ending_s': 3.0}


def slurm_site(partition: str = 'batch', **settings: Any) -> SlurmSite:
    return SlurmSite(partition=partition, **{**QUICK, **settings})


class Blocks:
    """A provider, and the jobs that it has opened."""

    def __init__(self, folder: Path, site: SlurmSite) -> None:
        self.folder = folder
        self.site = site
        self.provider = BackfillProvider(site, min_hole_s=0, worker_init='export GREETING="it\'s $((1 + 1))"')
        self.provider.script_dir = str(folder)
        self.jobs: list[str] = []
        site.start()

    def open(self, nodes: int, walltime_s: float | None = 300.0, command: str = 'sleep 600') -> str:
        self.jobs.append(self.provider.open_block(command, BlockRequest(nodes, walltime_s), f'block-{len(self.jobs)}'))
        return self.jobs[-1]

    def status(self, job: str) -> JobStatus:
        return self.provider.status([job])[0]

    def output(self) -> str:
        return ''.join(path.read_text() for path in sorted(self.folder.glob('*.out')))


@pytest.fixture
def blocks(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Blocks]]:
    """Makes sites on the cluster, with their blocks in a folder that a shell would stumble on."""
    made: list[Blocks] = []

    def make(partition: str = 'batch', **settings: Any) -> Blocks:
        folder = tmp_path / f"a run's $HOME %j folder {len(made)}"
        folder.mkdir()
        made.append(Blocks(folder, slurm_site(partition, **settings)))
        return made[-1]

    yield make
    for each in made:
        each.provider.cancel(each.jobs)
