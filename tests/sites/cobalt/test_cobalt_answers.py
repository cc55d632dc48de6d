"""What Cobalt's answers say, by its source and Theta's guide, and the scripts for its qsub."""

import subprocess
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites import cobalt as answers
from parsl_freetrain.sites.batch import records
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output, shape_for
from parsl_freetrain.sites.cobalt import Cobalt, CobaltOptions, CobaltSite
from parsl_freetrain.sites.named import load_site_file, site_files

GOLDEN = Path(__file__).with_name('golden')

RECORDED = Path(__file__).with_name('recorded')


def said(command: str) -> str:
    return (RECORDED / f'{command}.txt').read_text()


def test_jobs() -> None:
    nodes = 'nid00020', 'nid00021', 'nid00022', 'nid00024'
    times = 1510232750.0, 1510239950.0
    running, held = answers.parse_jobs(said('qstat'), 'pool')
    assert running == records.BatchJob(
        '104927', records.JobState.RUNNING, 'pool', 4, *times, (), nodes, 'user1', 'running', 'N/A',
        limit_s=7200.0,
    )  # fmt: skip
    assert held == records.BatchJob(
        '104941', records.JobState.HELD, 'pool', 2048, None, None, (), (), 'user2', 'dep_hold',
        'a: name', limit_s=1200.0,
    )  # fmt: skip
    assert answers.parse_jobs('', 'pool') == ()
    with pytest.raises(records.NotUnderstood, match='StartTime'):
        answers.parse_jobs('JobID: 1\n    State : running\n', 'pool')


def test_nodes() -> None:
    flat, cache = ('mcdram=flat', 'numa=quad'), ('mcdram=cache', 'numa=quad')
    assert set(answers.parse_nodes(said('nodelist'), 'default', 1000.0)) == {
        records.Nodes('default', ('nid00020',), 'cleanup-pending', '', flat, until_s=18960.0),
        records.Nodes('default', ('nid00028', 'nid00029'), 'idle', '', flat, until_s=18960.0),
        records.Nodes('default', ('nid00030',), 'idle', '', cache),
    }


def test_reservations() -> None:
    nodes = 'nid00000', 'nid00001', 'nid00002', 'nid00007'
    [found] = answers.parse_reservations(said('showres'))
    assert found == records.NodeReservation('Monday 13', 1510560000.0, 1510590600.0, nodes)
    assert answers.parse_reservations('') == ()


def test_queues() -> None:
    found = answers.parse_queues(
        'Name: debug\n    MinTime : 00:05:00\n    MaxTime : 01:00:00\n    MaxUserNodes : '
        '8\n    MaxQueued : 1\n'
        '    State : running\n\nName: default\n    MaxTime : None\n    State : draining\n'
    )
    assert found == {
        'debug': records.Partition('debug', True, 3600.0, 0, 8, shortest_s=300.0, most_waiting=1),
        'default': records.Partition('default', False),
    }


def test_a_jobs_own_log() -> None:
    normally = 'task completed normally with an exit code of '
    abnormally, too_long = normally.replace('nor', 'abnor'), 'maximum execution time exceeded'
    for log, state in (
        ('submitted with cwd set to: /x', None),
        (f'{normally}0; initiating job cleanup and removal', 'COMPLETED'),
        (f'{abnormally}143; initiating job cleanup and removal', 'FAILED'),
        (f'{too_long}; initiating job terminiation\n{normally}143', 'TIMED_OUT'),
        (f'user delete requested by eve\n{normally}143', 'CANCELLED'),
    ):
        assert answers.ended(log) == state


PLACE = Output('freetrain.r1.block-0', '/lus/me/block-0.out', '/lus/me/block-0.err')


def test_the_script_of_theta_is_the_golden_one() -> None:
    site = load_site_file(site_files()['theta']).site(account='my-project')
    assert isinstance(site, CobaltSite)
    shape = shape_for(
        128, 5000.0, (), site.options, 9e9, 1_800_000_000.0, 60, site.options.shortest_s
    )
    golden = GOLDEN / 'theta.sh'
    words = "process_worker_pool.py --cert_dir '/a b'"
    assert Cobalt(site.options).render(shape, PLACE, words) == golden.read_text()
    subprocess.run(['/bin/bash', '-n', str(golden)], check=True)


@pytest.mark.parametrize('path', ['/a b', "/it's", '/a\\b'])
def test_paths_that_directives_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match='another name'):
        Cobalt(CobaltOptions(queue='q')).render(
            BlockShape(1, 60, 60), Output('n', path, '/e'), 'true'
        )
