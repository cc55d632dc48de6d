"""Scripts for qsub: what is asked for which hole, and what a user's words cannot do."""

import subprocess
from pathlib import Path

import pytest

from parsl_freetrain.core.model.checked_settings import read_settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output, shape_for
from parsl_freetrain.sites.pbspro import PbsOptions
from parsl_freetrain.sites.pbspro.script import render, task_manager
from tests.support.programs import programs, run_script
from tests.support.waiting import LIMIT_S

NOW = 1_800_000_000.0
PLACE = Output('freetrain.r1.block-0', '/eagle/me/block-0.out', '/eagle/me/block-0.err')


def options(**settings: object) -> PbsOptions:
    return read_settings(PbsOptions, 'PBS', {'queue': 'batch', **settings})


def test_walltimes_are_in_seconds_and_fit_the_hole() -> None:
    shape = shape_for(2, 1000.5, (), options(start_s=30.0), 36000.0, NOW, 1)
    assert shape == BlockShape(2, 970, 485, 1_800_001_000)
    script = render(options(), shape, PLACE, 'true')
    assert '#PBS -l min_walltime=00:08:05,max_walltime=00:16:10\n' in script
    assert '#PBS -l walltime=00:16:10\n' in render(
        options(), BlockShape(2, 970, 970), PLACE, 'true'
    )


def test_blocks_that_may_be_preempted_may_be_requeued() -> None:
    """Otherwise a scheduler that preempts by requeueing waits for their end."""
    for settings, line in (({}, 'n'), ({'requeue': True}, 'y'), ({'mode': 'preemptible'}, 'y')):
        script = render(options(**settings), BlockShape(1, 60, 60), PLACE, 'true')
        assert f'#PBS -r {line}\n' in script


def test_blocks_are_asked_for_at_the_lowest_priority() -> None:
    assert '#PBS -p -1024\n' in render(options(), BlockShape(1, 60, 60), PLACE, 'true')


@pytest.mark.parametrize('ahead_s', [3600, -3600, 0])
def test_a_block_ends_with_its_hole_whatever_its_clock_says(tmp_path: Path, ahead_s: int) -> None:
    """By the scheduler's times, the job has waited for 40 s of a hole of 300."""
    shape = shape_for(1, 300.0, (), options(start_s=30.0), 36000.0, NOW, 1)
    script = render(options(launch=('true',)), shape, PLACE, 'true')
    told = '    Resource_List.walltime = 01:00:00\n    ctime = Thu Nov 26 17:00:10 2026\n'
    told += '    stime = Thu Nov 26 17:00:50 2026\n'
    left_s = int(
        run_script(
            tmp_path, script, 'PBS_JOBID', qstat=f'cat <<END\n{told}END',
            date=f'[ $# != 1 ] || exec echo {int(NOW) + ahead_s}; exec /bin/date "$@"',
            timeout='case $1 in 20) shift; exec "$@";; *) echo "$3" >"$SAID";; esac',
        )
    )  # fmt: skip
    assert 300 - 40 - 10 - 5 <= left_s <= 300 - 40 - 10, 'ending_s is 10'


def test_what_a_user_writes_stays_one_word(tmp_path: Path) -> None:
    marker = tmp_path / 'was run'
    command = f"""echo 'it''s' "$(touch '{marker}')" ; `touch '{marker}'`"""
    place = Output('n', f'/a b/$(touch {marker})/%j.out', '/e')
    script = render(options(launch=('mpiexec',)), BlockShape(1, 60, 60), place, command)
    assert f'#PBS -o "/a b/$(touch {marker})/%j.out"\n' in script
    said = {'qstat': 'echo', 'mpiexec': 'shift $(($# - 1)); printf %s "$1" >"$SAID"'}
    assert run_script(tmp_path, script, 'PBS_JOBID', **said) == command
    assert not marker.exists()


@pytest.mark.parametrize('path', ["/it's", '/a"b', '/host:x', '/a\nb'])
def test_paths_that_directives_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match='another name'):
        render(options(), BlockShape(1, 60, 60), Output('n', path, '/e'), 'true')


def test_a_block_of_a_class_asks_for_its_resources() -> None:
    given = options(
        node_resources={'system': 'polaris'}, node_classes={'big': {'memsize': 'l', 'system': 'x'}}
    )
    plain, big = (
        render(given, BlockShape(2, 60, 60, node_class=c), PLACE, 'true') for c in ('', 'big')
    )
    assert '#PBS -l select=2:system=polaris\n' in plain
    assert '#PBS -l select=2:system=x:memsize=l\n' in big


def test_one_task_is_spawned_for_each_node_and_none_to_end_the_block(tmp_path: Path) -> None:
    """SIGTERM is told to the first node without PBS; the others end when the block's time is up."""
    tmrsh = f'echo "$1" >>{tmp_path}/spawned; shift\nexec env --default-signal=TERM "$@"'
    fakes = programs(tmp_path / 'bin', pbs_tmrsh=tmrsh)
    (tmp_path / 'nodes').write_text('node02\nnode01\nnode02\n')
    launcher = subprocess.Popen(
        [*task_manager(str(tmp_path / 'block')), '/bin/bash', '-c', 'echo; exec sleep 600'],
        env={'PATH': f'{fakes}:/usr/bin:/bin', 'PBS_NODEFILE': f'{tmp_path}/nodes', 'left': '1'},
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout is not None
    with launcher:
        for _ in range(2):  # both nodes run
            assert launcher.stdout.readline()
        launcher.terminate()
        assert launcher.wait(LIMIT_S) == 124  # of the last node
    assert sorted((tmp_path / 'spawned').read_text().split()) == ['node01', 'node02']
    assert not list(tmp_path.glob('block*'))


def test_options_that_pbs_does_not_have() -> None:
    for settings, sentence in (
        ({'pin_nodes': True}, 'number of nodes'),
        ({'priority': 5000}, 'priority'),
        ({'filesystems': ('a:b',)}, 'filesystems'),
        ({'pbs_options': ('l x=y',)}, 'must be an option'),
    ):
        with pytest.raises(BadInput, match=sentence):
            options(**settings)
