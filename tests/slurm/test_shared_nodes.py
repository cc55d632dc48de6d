"""Nodes that jobs share: a partly used one serves a job as far as its free CPUs and memory go."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.sites.giving import LASTS, give
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm


@pytest.fixture
def shared(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, has_slurm: None
) -> Iterator[Cluster]:
    """Five nodes of four CPUs and 4000 MB, so many of them of twice as much."""
    sizes = {'SLURM_CLUSTER_CPUS': '4', 'SLURM_CLUSTER_LARGE': str(request.param)}
    with Cluster.running(5, within='/tmp', **sizes) as cluster:
        monkeypatch.setenv('SLURM_CONF', str(cluster.conf))
        yield cluster


@pytest.mark.parametrize(
    ('shared', 'asked', 'gives'),
    [(0, '--ntasks=9', 2), (1, '--ntasks=1 --cpus-per-task=8', 1)],
    indirect=['shared'],
)
def test_a_job_gets_as_few_whole_nodes_as_the_others_leave_it(
    shared: Cluster, tmp_path: Path, asked: str, gives: int
) -> None:
    """Three nodes have a CPU and 1000 MB left, the last two are of blocks."""

    def submit(*options: str, seconds: int = 3000) -> str:
        return shared.run(
            *('sbatch', '--parsable', '--output=/dev/null', *options),
            f'--wrap=exec sleep {seconds}',
        ).strip()

    for _ in range(3):
        submit('--ntasks=3', '--nodes=1', '--mem=3000', '--time=100')
    shared.wait(lambda: len(shared.run('squeue', '-h', '-t', 'R', '-o', '%i').split()) == 3)
    over = Event()
    with ThreadPoolExecutor() as pool:
        try:
            giving = pool.submit(give, tmp_path, over, slurm_site(**LASTS))
            shared.wait(lambda: giving.done() or (tmp_path / 'runs').exists())
            job = submit(*asked.split(), '--time=60')
            shared.wait(lambda: not shared.run('squeue', '-h', '-t', 'PD'), under_load(60.0))
            blocks = shared.run('squeue', '-h', '-t', 'R', '-o', '%j').count('freetrain.')
            assert shared.run('squeue', '-h', '-t', 'R', '-o', '%F').count(job)
            assert blocks == 2 - gives
        finally:
            over.set()
    giving.result()
