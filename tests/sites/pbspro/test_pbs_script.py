"""Scripts for qsub: golden files of the site config, what is asked for which hole, and what a
user's words cannot do.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.shape import BlockShape, Place, shape_for
from parsl_freetrain.sites.named import load_site_file, site_files
from parsl_freetrain.sites.pbspro import PbsOptions, PbsSite
from parsl_freetrain.sites.pbspro.script import render
from tests.support.waiting import LIMIT_S

GOLDEN = Path(__file__).with_name('golden')
NOW = 1_800_000_000.0
PLACE = Place('freetrain.r1.block-0', '/eagle/me/block-0.out', '/eagle/me/block-0.err')


def options(**settings: object) -> PbsOptions:
    return PbsOptions.model_validate({'queue': 'batch', **settings})


MACHINES = ('polaris', 'crux', 'aurora')


@pytest.mark.parametrize(
    ('machine', 'queue', 'nodes', 'hole_s'),
    [
        ('polaris', 'preemptable', 10, None),
        ('polaris', 'prod', 10, 5000.0),
        ('polaris', 'capacity', 4, 5000.0),
        ('crux', 'preemptable', 10, None),
        ('aurora', 'capacity', 16, 5000.0),
    ],
)
def test_the_script_of_a_machine_is_the_golden_one(
    machine: str, queue: str, nodes: int, hole_s: float | None
) -> None:
    site = load_site_file(site_files()[machine]).site(account='my-project', queue=queue)
    assert isinstance(site, PbsSite)
    shape = shape_for(nodes, hole_s, (), site.options, None, NOW, 1, site.options.shortest_s)
    script = render(site.options, shape, PLACE, "process_worker_pool.py --cert_dir '/a b'")
    golden = GOLDEN / f'{machine}-{queue}.sh'
    assert script == golden.read_text()
    subprocess.run(['/bin/bash', '-n', str(golden)], check=True)


@pytest.mark.parametrize('machine', MACHINES)
def test_every_queue_of_a_machine_keeps_its_limits(machine: str) -> None:
    module = load_site_file(site_files()[machine])
    for queue, limits in module.QUEUES.items():
        options = module.site(account='my-project', queue=queue).options
        assert (options.least_nodes, options.most_nodes) == limits.nodes
        assert limits.walltime_s[0] <= options.shortest_s <= options.longest_s
        assert options.longest_s <= limits.walltime_s[1]
        assert options.max_waiting <= limits.jobs
        assert (options.mode == 'preemptible') == limits.preemptible
        assert 'export TMPDIR=/tmp' in options.worker_init


@pytest.mark.parametrize('machine', MACHINES)
@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'account': 'p', 'queue': 'nosuch'}, "has no queue 'nosuch' for blocks; it has "),
        ({}, 'takes no job without an account; give account="PROJECT"'),
        ({'account': 'p', 'filesystems': ()}, 'takes no job without its file systems'),
    ],
)
def test_what_a_machine_needs_is_asked_for_in_a_sentence(
    machine: str, settings: dict[str, object], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('FREETRAIN_ACCOUNT', raising=False)
    with pytest.raises(BadInput, match=sentence):
        load_site_file(site_files()[machine]).site(**settings)


def test_walltimes_are_in_seconds_and_fit_the_hole() -> None:
    shape = shape_for(2, 1000.5, (), options(start_s=30.0), 36000.0, NOW, 1)
    assert shape == BlockShape(2, 970, 485, 1_800_001_000)
    script = render(options(), shape, PLACE, 'true')
    assert '#PBS -l min_walltime=00:08:05,max_walltime=00:16:10\n' in script
    assert '#PBS -l walltime=00:16:10\n' in render(
        options(), BlockShape(2, 970, 970), PLACE, 'true'
    )


@pytest.mark.parametrize(
    ('settings', 'line'), [({}, 'n'), ({'requeue': True}, 'y'), ({'mode': 'preemptible'}, 'y')]
)
def test_blocks_that_may_be_preempted_may_be_requeued(
    settings: dict[str, object], line: str
) -> None:
    """Otherwise a scheduler that preempts by requeueing waits for their end."""
    script = render(options(**settings), BlockShape(1, 60, 60), PLACE, 'true')
    assert f'#PBS -r {line}\n' in script


def test_blocks_are_asked_for_at_the_lowest_priority() -> None:
    assert '#PBS -p -1024\n' in render(options(), BlockShape(1, 60, 60), PLACE, 'true')


def test_what_a_user_writes_stays_one_word(tmp_path: Path) -> None:
    marker = tmp_path / 'was run'
    command = f"""echo 'it''s' "$(touch '{marker}')" ; `touch '{marker}'`"""
    place = Place('n', f'/a b/$(touch {marker})/%j.out', '/e')
    script = render(options(launch=('mpiexec',)), BlockShape(1, 60, 60), place, command)
    assert f'#PBS -o "/a b/$(touch {marker})/%j.out"\n' in script
    fakes = tmp_path / 'bin'
    fakes.mkdir()
    for name, text in (
        ('qstat', 'echo'),
        ('mpiexec', 'shift $(($# - 1)); printf %s "$1" >"$SAID"'),
    ):
        (fakes / name).write_text(f'#!/bin/bash\n{text}\n')
        (fakes / name).chmod(0o700)
    (tmp_path / 'script').write_text(script)
    subprocess.run(
        ['/bin/bash', str(tmp_path / 'script')],
        check=True,
        timeout=LIMIT_S,
        env={'PATH': f'{fakes}:/usr/bin:/bin', 'PBS_JOBID': '1', 'SAID': str(tmp_path / 'said')},
    )
    assert (tmp_path / 'said').read_text() == command
    assert not marker.exists()


@pytest.mark.parametrize('path', ["/it's", '/a"b', '/host:x', '/a\nb'])
def test_paths_that_directives_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match='another name'):
        render(options(), BlockShape(1, 60, 60), Place('n', path, '/e'), 'true')
