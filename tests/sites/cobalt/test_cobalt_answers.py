"""What Cobalt's answers say, in the forms of its source and of the user guide of Theta, and the
scripts for its qsub.
"""

import subprocess
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites import cobalt as answers
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output, shape_for
from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    NotUnderstood,
    Partition,
)
from parsl_freetrain.sites.cobalt import Cobalt, CobaltOptions, CobaltSite
from parsl_freetrain.sites.named import load_site_file, site_files

GOLDEN = Path(__file__).with_name('golden')

QSTAT = """JobID: 104927
    User      : user1
    State     : running
    Nodes     : 4
    Location  : 20-22,24
    Queue     : backfill
    WallTime  : 02:00:00
    StartTime : Thu Nov 09 13:05:50 2017 +0000 (UTC)
    JobName   : N/A

JobID: 104941
    User      : user2
    State     : dep_hold
    Nodes     : 2048
    Location  : None
    Queue     : default
    WallTime  : 00:20:00
    StartTime : N/A
    JobName   : a: name
"""
NODELIST = """Node_id  Name         Queues             Status           MCDRAM  NUMA    Backfill
================================================================================
20       c0-0c0s5n0   default:backfill   cleanup-pending  flat    quad    4:59:44
[28]     c0-0c0s7n0   default            idle             flat    quad    4:59:44
29       c0-0c0s7n1   default            idle             flat    quad    4:59:44
30       c0-0c0s7n2   default            idle             cache   quad    -
31       c0-0c0s7n3   debug              idle             cache   quad    -
"""
SHOWRES = """\
Reservation     Queue     User  Start                                 Duration  Passthrough  Nodes
================================================================================================
Monday 13       R.pm      None  Mon Nov 13 08:00:00 2017 +0000 (UTC)  08:30     Blocked      0-2,7
"""


def test_jobs() -> None:
    assert answers.parse_jobs(QSTAT, 'pool') == (
        BatchJob(
            '104927',
            JobState.RUNNING,
            'pool',
            4,
            1510232750.0,
            1510239950.0,
            (),
            ('nid00020', 'nid00021', 'nid00022', 'nid00024'),
            'user1',
            'running',
            'N/A',
            limit_s=7200.0,
        ),
        BatchJob(
            '104941',
            JobState.HELD,
            'pool',
            2048,
            None,
            None,
            (),
            (),
            'user2',
            'dep_hold',
            'a: name',
            limit_s=1200.0,
        ),
    )
    assert answers.parse_jobs('', 'pool') == ()
    with pytest.raises(NotUnderstood, match='StartTime'):
        answers.parse_jobs('JobID: 1\n    State : running\n', 'pool')


def test_nodes() -> None:
    flat, cache = ('mcdram=flat', 'numa=quad'), ('mcdram=cache', 'numa=quad')
    assert set(answers.parse_nodes(NODELIST, 'default', 1000.0)) == {
        Nodes('default', ('nid00020',), 'cleanup-pending', '', flat, until_s=18960.0),
        Nodes('default', ('nid00028', 'nid00029'), 'idle', '', flat, until_s=18960.0),
        Nodes('default', ('nid00030',), 'idle', '', cache),
    }
    with pytest.raises(NotUnderstood):
        answers.parse_nodes('failed to connect\n', 'default', 0.0)


def test_reservations() -> None:
    assert answers.parse_reservations(SHOWRES) == (
        NodeReservation(
            'Monday 13',
            1510560000.0,
            1510590600.0,
            ('nid00000', 'nid00001', 'nid00002', 'nid00007'),
        ),
    )
    assert answers.parse_reservations('') == ()


def test_queues() -> None:
    found = answers.parse_queues(
        'Name: debug\n    MinTime : 00:05:00\n    MaxTime : 01:00:00\n    MaxUserNodes : '
        '8\n    MaxQueued : 1\n'
        '    State : running\n\nName: default\n    MaxTime : None\n    State : draining\n'
    )
    assert found == {
        'debug': Partition('debug', True, 3600.0, 0, 8, shortest_s=300.0, most_waiting=1),
        'default': Partition('default', False),
    }


def test_a_jobs_own_log() -> None:
    for log, state in (
        ('submitted with cwd set to: /x', None),
        (
            'task completed normally with an exit code of 0; initiating job cleanup and removal',
            'COMPLETED',
        ),
        (
            'task completed abnormally with an exit code of 143; initiating job cleanup '
            'and removal',
            'FAILED',
        ),
        (
            'maximum execution time exceeded; initiating job terminiation\ntask '
            'completed normally with an exit code of 143',
            'TIMED_OUT',
        ),
        (
            'user delete requested by eve\ntask completed normally with an exit code of 143',
            'CANCELLED',
        ),
    ):
        assert answers.ended(log) == state


PLACE = Output('freetrain.r1.block-0', '/lus/me/block-0.out', '/lus/me/block-0.err')


def test_the_script_of_theta_is_the_golden_one() -> None:
    site = load_site_file(site_files()['theta']).site(account='my-project')
    assert isinstance(site, CobaltSite)
    shape = shape_for(
        128, 5000.0, (), site.options, None, 1_800_000_000.0, 60, site.options.shortest_s
    )
    golden = GOLDEN / 'theta.sh'
    assert (
        Cobalt(site.options).render(shape, PLACE, "process_worker_pool.py --cert_dir '/a b'")
        == golden.read_text()
    )
    subprocess.run(['/bin/bash', '-n', str(golden)], check=True)


@pytest.mark.parametrize('path', ['/a b', "/it's", '/a\\b'])
def test_paths_that_directives_cannot_hold_are_refused(path: str) -> None:
    with pytest.raises(BadInput, match='another name'):
        Cobalt(CobaltOptions(queue='q')).render(
            BlockShape(1, 60, 60), Output('n', path, '/e'), 'true'
        )
