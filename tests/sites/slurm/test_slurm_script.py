"""Batch scripts: golden files, what is asked for which hole, and what users' words cannot do."""

import math
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.model.checked_settings import read_settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.sites.batch.block_shape import (
    BlockShape,
    Output,
    is_block_of,
    job_name,
    shape_for,
)
from parsl_freetrain.sites.batch.records import Partition
from parsl_freetrain.sites.named import load_site_file, site_files, site_in_table
from parsl_freetrain.sites.slurm import SlurmOptions, SlurmSite
from parsl_freetrain.sites.slurm.script import render
from tests.support.programs import run_script
from tests.support.waiting import LIMIT_S

GOLDEN = Path(__file__).with_name('golden')
NOW = 1_800_000_000.0
PLACE = Output('freetrain.r1.block-0', '/scratch/me/block-0.out', '/scratch/me/block-0.err')


def options(**settings: object) -> SlurmOptions:
    return read_settings(SlurmOptions, 'Slurm', {'partition': 'batch', **settings})


@pytest.mark.usefixtures('utc')
def test_the_script_of_a_site_config_is_the_golden_one() -> None:
    [ours] = load_site_file(site_files()['slurm_generic']).config().executors
    given = ours.provider.site.options
    shape = shape_for(4, 1000.0, (), given, 172800.0, NOW)
    script = render(given, shape, PLACE, "process_worker_pool.py --cert_dir '/a b'")
    golden = GOLDEN / 'slurm_generic.sh'
    assert script == golden.read_text()
    subprocess.run(['/bin/bash', '-n', str(golden)], check=True)


@pytest.mark.parametrize(
    ('hole_s', 'settings', 'shape'),
    [
        (1000.0, {}, BlockShape(2, 960, 480, 1_800_001_000)),
        (60.0, {}, BlockShape(2, 60, 60, 1_800_000_060)),
        (149.9, {'shrink': 1.0}, BlockShape(2, 60, 60, 1_800_000_149)),
        (None, {}, BlockShape(2, 300, 120)),
        (None, {'mode': 'preemptible'}, BlockShape(2, 3600, 1800)),
        (None, {'longest_s': 119.0}, BlockShape(2, 60, 60)),
        (1000.0, {'mode': 'preemptible'}, BlockShape(2, 960, 480)),
        (90000.0, {}, BlockShape(2, 36000, 18000, 1_800_090_000)),
    ],
)
def test_a_block_fits_its_hole(
    hole_s: float | None, settings: dict[str, object], shape: BlockShape
) -> None:
    assert shape_for(2, hole_s, ('a', 'b'), options(**settings), 36000.0, NOW) == shape


@given(st.floats(60, 1e5), st.floats(0, 300), st.floats(0.01, 1.0))
def test_no_block_outlives_its_hole(hole_s: float, start_s: float, shrink: float) -> None:
    shape = shape_for(1, hole_s, (), options(start_s=start_s, shrink=shrink), math.inf, NOW)
    assert shape.deadline is not None
    assert 60 <= shape.least_s <= shape.walltime_s
    assert NOW + shape.walltime_s <= NOW + hole_s
    assert shape.deadline <= NOW + hole_s


def test_nodes_are_named_only_where_asked() -> None:
    assert shape_for(2, 600.0, ('a', 'b'), options(pin_nodes=True), 9e9, NOW).names == ('a', 'b')
    assert '--nodelist=a,b' in render(
        options(), BlockShape(2, 300, 300, names=('a', 'b')), PLACE, 'true'
    )


def test_nodes_that_a_request_avoids_are_excluded(tmp_path: Path) -> None:
    """Such as one with a broken device."""
    site = SlurmSite(partition='batch')
    site.script_dir = str(tmp_path)
    request = BlockRequest(2, 300.0, avoid=('a', 'b'))
    _, _, script = site._submitter.preview(
        request, Partition('batch'), tmp_path, 'block', 'true', ''
    )
    assert '#SBATCH --exclude=a,b' in script


def test_what_a_user_writes_stays_one_word(tmp_path: Path) -> None:
    """No folder or command can leave its quotes: bash sees the words that went in."""
    marker = tmp_path / 'was run'
    command = f"""echo 'it''s' "$(touch '{marker}')" ; `touch '{marker}'`"""
    place = Output('n', f'/a b/$(touch {marker})/%j.out', "/it's.err")
    script = render(options(account='x;reboot'), BlockShape(1, 300, 300), place, command)
    assert "#SBATCH '--account=x;reboot'" in script
    assert '%%j.out' in script
    said = {'squeue': 'echo', 'srun': 'shift $(($# - 1)); printf %s "$1" >"$SAID"'}
    assert run_script(tmp_path, script, 'SLURM_JOB_ID', **said) == command
    assert not marker.exists()


def test_a_block_learns_its_end_whatever_its_worker_init_and_a_wrapper_do(tmp_path: Path) -> None:
    timeout = 'case $1 in 20) shift; exec "$@";; *) printf %s "$2" >"$SAID";; esac'
    for squeue, left_s in (('exit 1', 290), ('echo Welcome; echo 1000 1160', 150)):
        strict = options(worker_init='set -euo pipefail')
        script = render(strict, BlockShape(1, 300, 300), PLACE, 'true')
        found = run_script(tmp_path, script, 'SLURM_JOB_ID', squeue=squeue, timeout=timeout)
        assert left_s - LIMIT_S < int(found) <= left_s


def test_a_deadline_in_the_hour_that_clocks_pass_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin 02:30 on 25 October 2026 is at 1792888200, and an hour later again."""
    monkeypatch.setenv('TZ', 'Europe/Berlin')
    time.tzset()
    for at, said in ((0, 'now+900'), (3600, 'now+900'), (7200, '2026-10-25T03:30:00')):
        shape = shape_for(1, 900.0, (), options(), math.inf, 1_792_888_200.0 + at - 900)
        assert f'#SBATCH --deadline={said}\n' in render(options(), shape, PLACE, 'true')


def test_jobs_are_known_by_their_run() -> None:
    name = job_name("my run's $HOME", 'parsl.freetrain.block-0.0a1b2c')
    assert name == 'freetrain.my_run_s__HOME.parsl.freetrain.block-0.0a1b2c'
    assert is_block_of("my run's $HOME", name)
    assert not is_block_of('my', name)


@pytest.mark.parametrize(
    ('text', 'sentence'),
    [
        ('partition = "batch"\nnise = 4', 'there is no nise'),
        ('nice = 4', 'partition is missing'),
        ('partition = "a b"', "partition is 'a b'; it must be a text without spaces"),
        ('partition = "batch"\nlongest_s = 30', 'longest_s is 30; it must be .* 60 or more'),
        ('partition = "batch"\nconstraint = "[a*2]"', 'without brackets'),
        ('partition = "batch"\nsbatch_options = ["licenses=x"]', 'must be an option'),
        ('partition = "batch"\nmode = "greedy"', 'backfill'),
        ('partition = ', 'is not TOML'),
    ],
)
def test_site_files_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / 'site.toml'
    file.write_text(text)
    with pytest.raises(BadInput, match=f'The site file {file}.*{sentence}'):
        site_in_table(file)


def test_site_files(tmp_path: Path) -> None:
    file = tmp_path / 'site.toml'
    file.write_text(
        '[slurm]\npartition = "gpu"\nconstraint = "a100&hbm|h100"\nsbatch_options = '
        '["--licenses=x"]\n'
    )
    site = site_in_table(file)
    assert isinstance(site, SlurmSite)
    read = site.options
    assert (read.partition, read.sbatch_options) == ('gpu', ('--licenses=x',))
    assert read.features() == (frozenset({'a100', 'hbm'}), frozenset({'h100'}))
    with pytest.raises(BadInput, match='cannot be read'):
        site_in_table(tmp_path / 'nosuch.toml')


def test_settings_and_options_exclude_each_other() -> None:
    with pytest.raises(BadInput, match='one or the other'):
        SlurmSite(options(), partition='batch')
    with pytest.raises(BadInput, match='there is no partiton'):
        SlurmSite(partiton='batch')


def test_a_block_of_a_class_asks_for_its_features_or_gpus() -> None:
    given = options(
        constraint='ib|roce', gpus_per_node=4, node_classes={'old': 'v100|p100', 'new': 'gpu:a100'}
    )

    def asked(node_class: str) -> list[str]:
        script = render(given, BlockShape(1, 60, 60, node_class=node_class), PLACE, 'true')
        return [
            line.removeprefix('#SBATCH ').strip("'")
            for line in script.splitlines()
            if '--constraint=' in line or '--gres=' in line
        ]

    assert asked('') == ['--constraint=ib|roce', '--gres=gpu:4']
    assert asked('old') == ['--constraint=ib&v100|ib&p100|roce&v100|roce&p100', '--gres=gpu:4']
    assert asked('new') == ['--constraint=ib|roce', '--gres=gpu:a100:4']
    assert given.class_of(('ib', 'p100', 'gpu:p100')) == 'old'
    assert given.class_of(('ib', 'gpu:a100')) == 'new'
    assert given.class_of(('ib',)) == ''


@pytest.mark.parametrize(
    ('classes', 'why'),
    [
        ({'a': '[x&y]'}, 'without brackets'),
        ({'a': 'gpu:a100'}, 'gpus_per_node is 0'),
        ({'a b': 'x'}, 'node_classes'),
    ],
)
def test_classes_that_cannot_be_asked_for_are_refused(classes: dict[str, str], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        SlurmSite(partition='batch', node_classes=classes)
