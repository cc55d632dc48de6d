"""The machines of site_configs/, one contract: golden scripts, limits of queues, prices."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import Output, shape_for
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.named import load_site_file, site_files
from parsl_freetrain.sites.pbspro.script import render as of_pbs
from parsl_freetrain.sites.slurm.script import render as of_slurm
from tests.support.programs import run_to_end

GOLDEN = Path(__file__).with_name('golden')
NOW = 1_800_000_000.0
PLACE = Output('freetrain.r1.block-0', '/project/me/block-0.out', '/project/me/block-0.err')
COMMAND = "process_worker_pool.py --cert_dir '/a b'"
RENDER: dict[str, Any] = {'PbsSite': of_pbs, 'SlurmSite': of_slurm}
STEP_S = {'PbsSite': 1, 'SlurmSite': 60}

PBS = ('polaris', 'crux', 'aurora')
SLURM = ('frontier', 'perlmutter', 'delta')
MACHINES = (*PBS, *SLURM)


def site_on(machine: str, **settings: Any) -> BatchSite:
    if machine == 'perlmutter':
        settings = {'partition': 'gpu', **settings}
    site = load_site_file(site_files()[machine]).site(**settings)
    assert isinstance(site, BatchSite)
    return site


@pytest.mark.parametrize(
    ('machine', 'queue', 'nodes', 'hole_s'),
    [
        ('polaris', 'preemptable', 10, None),
        ('polaris', 'prod', 10, 5000.0),
        ('polaris', 'capacity', 4, 5000.0),
        ('crux', 'preemptable', 10, None),
        ('aurora', 'capacity', 16, 5000.0),
        ('frontier', 'batch', 91, 5000.0),
        ('perlmutter', 'preempt', 128, None),
        ('delta', 'gpuA100x4-preempt', 4, None),
    ],
)
@pytest.mark.usefixtures('utc')
def test_scripts_are_golden(machine: str, queue: str, nodes: int, hole_s: float | None) -> None:
    site = site_on(machine, account='my-project', queue=queue)
    kind = type(site).__name__
    shape = shape_for(
        nodes, hole_s, (), site.options, 9e9, NOW, STEP_S[kind], site.options.shortest_s
    )
    script = RENDER[kind](site.options, shape, PLACE, COMMAND)
    golden = GOLDEN / f'{machine}-{queue}.sh'
    if os.environ.get('WRITE_GOLDEN'):
        golden.write_text(script)
    assert script == golden.read_text()
    subprocess.run(['/bin/bash', '-n', str(golden)], check=True)


@pytest.mark.parametrize('machine', MACHINES)
def test_every_queue_of_a_machine_keeps_its_limits(machine: str) -> None:
    for queue, limits in load_site_file(site_files()[machine]).QUEUES.items():
        options = site_on(machine, account='my-project', queue=queue).options
        assert (options.least_nodes, options.most_nodes) == limits.nodes
        assert limits.walltime_s[0] <= options.shortest_s <= options.unplanned_s
        assert options.unplanned_s <= limits.walltime_s[1]
        assert options.max_waiting <= limits.jobs
        assert (options.mode == 'preemptible') == limits.preemptible
        assert 'TMPDIR=/tmp' in options.worker_init


@pytest.mark.parametrize('machine', MACHINES)
def test_what_a_machine_needs_is_asked_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('FREETRAIN_ACCOUNT', raising=False)
    with pytest.raises(BadInput, match="has no queue 'nosuch' for blocks; it has "):
        site_on(machine, account='p', queue='nosuch')
    with pytest.raises(BadInput, match='takes no job without an account; give account="PROJECT"'):
        site_on(machine)
    monkeypatch.setenv('FREETRAIN_ACCOUNT', 'mine')
    assert site_on(machine).options.account == 'mine'


def test_what_some_machines_need_besides() -> None:
    with pytest.raises(BadInput, match='Perlmutter takes no job without its partition; give'):
        site_on('perlmutter', account='p', partition=None)
    for machine in PBS:
        with pytest.raises(BadInput, match='no job without its file systems; give filesystems='):
            site_on(machine, account='p', filesystems=())
        with pytest.raises(BadInput, match="has no file system 'eagel'; give .* of home, "):
            site_on(machine, account='p', filesystems=('home', 'eagel'))


def test_what_a_block_costs() -> None:
    for machine, queue, hours, cost in (
        ('polaris', 'preemptable', 3.0, 3.0),
        ('delta', 'gpuA100x4-preempt', 3.0, 6.0),
        ('delta', 'gpuA40x4-preempt', 3.0, 3.0),
        ('perlmutter', 'preempt', 0.0, 2.0),  # the first two hours are charged in full
        ('perlmutter', 'preempt', 2.0, 2.0),
        ('perlmutter', 'preempt', 6.0, 3.0),
    ):
        options = site_on(machine, account='p', queue=queue).options
        assert options.charge.cost(1, 3600 * hours) == pytest.approx(cost)
        assert options.charge.cost(5, 3600 * hours) == pytest.approx(5 * cost)


def test_walltimes_on_frontier_depend_on_the_number_of_nodes() -> None:
    for queue, nodes, hours in (
        ('batch', (1, 91), 2),
        ('batch from 92 nodes', (92, 183), 6),
        ('batch from 184 nodes', (184, 9472), 12),
        ('extended', (1, 64), 24),
    ):
        site = site_on('frontier', account='p', queue=queue, longest_s=10**6)
        options = site.options
        assert (options.least_nodes, options.most_nodes) == nodes
        assert options.unplanned_s == hours * 3600
        assert f'partition={queue.split()[0]!r}' in repr(site)


def test_devices_on_frontier_are_hidden_by_one_variable_only(tmp_path: Path) -> None:
    """Slurm sets ROCR_VISIBLE_DEVICES."""
    lines = site_on('frontier', account='p', worker_init='').options.worker_init
    env = {'CUDA_VISIBLE_DEVICES': '0', 'ROCR_VISIBLE_DEVICES': '0', 'PATH': os.environ['PATH']}
    done = run_to_end(['/bin/bash', '-c', f'{lines}\nenv'], env=env, check=True)
    assert [line for line in done.stdout.split() if 'VISIBLE' in line] == ['ROCR_VISIBLE_DEVICES=0']
