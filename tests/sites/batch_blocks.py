"""Blocks on a machine in a folder, for the tests of the sites that have no real scheduler here."""

import math
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.types import BlockRequest, Hole
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.provider import BackfillProvider
from tests.support.waiting import wait_until

# In seconds.
QUICK: dict[str, Any] = {'poll_s': 0.3, 'submit_every_s': 0.0}
QUICK |= dict.fromkeys(('start_s', 'margin_s', 'ending_s', 'shortest_s'), 2.0)


class Blocks:
    """A provider, and the jobs that it has opened."""

    def __init__(self, folder: Path, site: BatchSite) -> None:
        folder.mkdir()
        self.folder = folder
        self.site = site
        self.provider = BackfillProvider(site, worker_init='export GREETING="it\'s $((1 + 1))"')
        self.provider.script_dir = str(folder)
        self.jobs: list[str] = []
        site.start()

    def open(
        self,
        nodes: int,
        walltime_s: float | None = 300.0,
        command: str = 'sleep 600',
        node_class: str = '',
        lasts_s: float = math.inf,
    ) -> str:
        request = BlockRequest(nodes, walltime_s, node_class=node_class, lasts_s=lasts_s)
        self.jobs.append(self.provider.open_block(request, command, f'block-{len(self.jobs)}'))
        return self.jobs[-1]

    def running(self, nodes: int = 1, **more: Any) -> str:
        """Open a block, and wait until it runs."""
        job = self.open(nodes, **more)
        wait_until(lambda: self.status(job).state is JobState.RUNNING)
        return job

    def status(self, job: str) -> JobStatus:
        return self.provider.status([job])[0]

    def holes(self) -> tuple[Hole, ...]:
        """Once the site has had an answer, and there are some."""
        found: list[tuple[Hole, ...]] = []
        wait_until(lambda: found.append(self.site.holes()) or found[-1])  # type: ignore[func-returns-value]
        return found[-1]

    def output(self) -> str:
        return ''.join(path.read_text() for path in sorted(self.folder.glob('*.out')))
