"""What tests on a real cluster share: a site that asks often, and an end of its blocks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.sites.slurm import SlurmSite
from tests.sites.batch_blocks import Blocks
from tests.support.slurm import Cluster

# In seconds; the cluster of the tests starts a job within some two.
QUICK = {'poll_s': 0.5, 'submit_every_s': 0.0, 'start_s': 3.0, 'margin_s': 2.0, 'ending_s': 3.0}


def slurm_site(partition: str = 'batch', **settings: Any) -> SlurmSite:
    return SlurmSite(partition=partition, **{**QUICK, **settings})


@pytest.fixture
def blocks(slurm: Cluster, tmp_path: Path) -> Iterator[Callable[..., Blocks]]:
    """Makes sites on the cluster, with their blocks in a folder that a shell would stumble on."""
    made: list[Blocks] = []

    def make(partition: str = 'batch', **settings: Any) -> Blocks:
        folder = tmp_path / f"a run's $HOME %j folder {len(made)}"
        made.append(Blocks(folder, slurm_site(partition, **settings)))
        return made[-1]

    yield make
    for each in made:
        each.provider.cancel(each.jobs)
