"""What PBS's answers say, as PBS 2022.1 on Polaris gives them; nothing was recorded there."""

import json
import math
import time
from collections.abc import Collection
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from dateutil.rrule import rrulestr  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.sites.batch import records
from parsl_freetrain.sites.batch.block_shape import Output
from parsl_freetrain.sites.batch.scheduler import NoHistory
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent
from parsl_freetrain.sites.pbspro import answers
from parsl_freetrain.sites.pbspro.documents import document
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.recurring import later_starts
from parsl_freetrain.sites.pbspro.scheduler import Pbs
from tests.support.programs import programs

pytestmark = pytest.mark.usefixtures('utc')
ZOO = Path(__file__).parents[1] / 'zoo' / 'openpbs-23.06'
RECORDED = Path(__file__).with_name('recorded')
NOW = 1699535000  # before the estimates below


NEW, OLD = frozenset({'model=new', 'bigmem=true'}), frozenset({'model=old'})


def jobs(known: Collection[str] = (), now: float = NOW, **job: Any) -> tuple[records.BatchJob, ...]:
    said: dict[str, Any] = {'Job_Name': 'n', 'Job_Owner': 'eve@login', 'queue': 'small'}
    said |= {'Resource_List': {'nodect': 2, 'walltime': '01:00:00'}, **job}
    text = json.dumps({'timestamp': now, 'Jobs': {'7.polaris': said}})
    return answers.parse_jobs(text, 'pool', known)


def test_a_running_job_has_nodes_and_an_end() -> None:
    vnodes = '(x1:ncpus=64:ngpus=4)+(x2[0]:ncpus=1+x2[1]:ncpus=1)'
    planned = {'start_time': 'Thu Nov  9 13:00:00 2023'}
    stime = 'Thu Nov  9 13:05:50 2023'
    [job] = jobs(job_state='R', stime=stime, run_count=2, exec_vnode=vnodes, estimated=planned)
    times = 1699535150.0, 1699538750.0
    assert job == records.BatchJob(
        '7.polaris', records.JobState.RUNNING, 'pool', 2, *times, (), ('x1', 'x2'), 'eve', '',
        'n', 2, limit_s=3600.0,
    )  # fmt: skip


def test_a_job_that_shares_nodes_says_what_it_takes() -> None:
    """Its chunks may be on one host, unless it is placed otherwise."""
    asked = {'nodect': 2, 'ncpus': 6, 'mem': '2gb', 'ngpus': 2, 'place': 'free'}
    for place, cpus, least in (('free', 6, 1), ('scatter', 6, 0), ('scatter:excl', 0, 0)):
        [job] = jobs(job_state='Q', Resource_List={**asked, 'place': place})
        assert (job.nodes, job.cpus, job.least_nodes) == (2, cpus, least)
        assert (job.memory, job.gpus) == (1024.0, 1 if cpus else 0)


def test_what_chunks_want() -> None:
    for said, expected in (
        ({'select': '1:ncpus=4+2:ncpus=8', 'ncpus': 20, 'nodect': 3}, {'cpus': 0}),
        ({'select': 'ncpus=4+2:ncpus=4', 'ncpus': 12, 'nodect': 3}, {'cpus': 12, 'step': 4}),
        ({'select': '1:host=x3+1:vnode=x4[0]', 'nodect': 2}, {'only': ('x3', 'x4')}),
        ({'select': '2:model=New:bigmem=True:ncpus=1'}, {'features': (NEW,)}),
        ({'select': '1:model=new:bigmem=true+1:model=old'}, {'features': (NEW, OLD)}),
        ({'select': '1:model=new+1:ncpus=4'}, {'features': ()}),
        ({'select': '1:model=unknown'}, {'partition': ''}),
    ):
        [job] = jobs(job_state='Q', Resource_List=said, known=[*NEW, *OLD, 'bigmem=false'])
        assert {name: getattr(job, name) for name in expected} == expected


def test_nodes_tell_their_words() -> None:
    """Also those that the site's settings do not name."""
    nodes: dict[str, Any] = {
        'x1': {'ncpus': 4, 'model': 'New', 'bigmem': 'True', 'host': 'x1'},
        'x2': {'ncpus': 4, 'model': 'old', 'mem': '8gb', 'vnode': 'x2'},
    }
    said = {name: {'state': 'free', 'resources_available': has} for name, has in nodes.items()}
    found = answers.parse_nodes(json.dumps({'nodes': said}), 'pool', {})
    assert {group.names[0]: group.features for group in found} == {
        'x1': ('bigmem=true', 'model=new'), 'x2': ('bigmem=false', 'model=old'),
    }  # fmt: skip


def test_a_job_whose_nodes_are_made_ready_has_an_end_although_it_has_no_start() -> None:
    [job] = jobs(job_state='R', substate=71, exec_vnode='(x1:ncpus=64)')
    assert (job.state, job.names, job.end_s) == (records.JobState.RUNNING, ('x1',), NOW + 3600.0)


def test_a_planned_job_has_a_start() -> None:
    planned = {'start_time': 'Thu Nov  9 13:05:50 2023'}
    both = {'exec_vnode': '(x1:ncpus=64)+(x2:ncpus=64)'}
    [job] = jobs(job_state='Q', estimated=planned | both)
    found = job.state, job.start_s, job.planned, job.names
    assert found == ('PENDING', 1699535150.0, ('x1', 'x2'), ())
    [job] = jobs(job_state='B', estimated={'start_time': 'Thu Nov  9 13:05:50 2023'})
    assert (job.state, job.start_s) == ('PENDING', 1699535150.0)  # an array that has begun
    [job] = jobs(job_state='H', estimated={'start_time': 'Thu Nov  9 13:05:50 2023'})
    assert (job.state, job.start_s) == ('HELD', None)


def test_an_estimate_that_has_gone_by_says_nothing() -> None:
    """As a real server answered: PBS renews only the estimates of the first jobs that wait."""
    said = json.loads((ZOO / 'qstat-f-stale-estimate.json').read_text(), strict=False)
    begun = {job.job_id: job.start_s for job in answers.parse_jobs(json.dumps(said), 'pool')}
    [stale, fresh] = [start for job, start in begun.items() if 'estimated' in said['Jobs'][job]]
    assert stale is not None and fresh is not None
    said['timestamp'] = stale + 119
    [found, _] = _planned(said)
    assert found.start_s == stale and len(found.planned) == 4
    said['timestamp'] = stale + 121
    [found, later] = _planned(said)
    assert (found.start_s, found.planned) == (None, ())
    assert later.start_s == fresh


def _planned(said: dict[str, Any]) -> list[records.BatchJob]:
    found = answers.parse_jobs(json.dumps(said), 'pool')
    return [job for job in found if 'estimated' in said['Jobs'][job.job_id]]


def test_times_of_the_hour_that_clocks_pass_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Berlin 02:30 on 25 October 2026 is at 1792888200, and an hour later again."""
    monkeypatch.setenv('TZ', 'Europe/Berlin')
    time.tzset()
    text, first, hour = 'Sun Oct 25 02:30:00 2026', 1792888200.0, 3600.0
    for later, ran, start in ((0, '00:01:00', 0), (hour, '00:01:00', hour), (hour, '01:00:30', 0)):
        used, now = {'walltime': ran, 'cput': '00:00:01'}, first + later + 60
        [job] = jobs(now=now, job_state='R', stime=text, resources_used=used)
        assert job.start_s == first + start
    for now, start in ((first - 900, first), (first + 900, first + hour)):
        [job] = jobs(now=now, job_state='Q', estimated={'start_time': text})
        assert job.start_s == start
    resv = f'Resv ID: R1\nreserve_start = {text}\nreserve_end = {text}\nresv_nodes = (x3:ncpus=4)\n'
    [reserved] = answers.parse_reservations(resv)  # for as long as it may be
    assert (reserved.start_s, reserved.end_s) == (first, first + hour)


def test_states() -> None:
    for job, state in (
        ({'job_state': 'F', 'substate': 92, 'Exit_status': 0}, 'COMPLETED'),
        ({'job_state': 'F', 'substate': 93, 'Exit_status': 3}, 'FAILED'),
        ({'job_state': 'F', 'substate': 93, 'Exit_status': -29}, 'TIMED_OUT'),
        ({'job_state': 'F', 'substate': 93, 'Exit_status': -27}, 'OUT_OF_MEMORY'),
        ({'job_state': 'F', 'substate': 93, 'Exit_status': -3}, 'BOOT_FAILED'),
        ({'job_state': 'F', 'substate': 93, 'Exit_status': 271}, 'PREEMPTED'),
        ({'job_state': 'F', 'substate': 91, 'Exit_status': 271}, 'CANCELLED'),
        ({'job_state': 'F', 'substate': 91, 'comment': 'Job preempted by 12.polaris'}, 'CANCELLED'),
        ({'job_state': 'E'}, 'ENDING'),
        ({'job_state': 'S'}, 'SUSPENDED'),
        ({'job_state': 'T'}, 'HELD'),
        ({'job_state': 'M'}, 'UNKNOWN'),
    ):
        assert [found.state for found in jobs(**job)] == [state]


VNODE: dict[str, Any] = {
    'state': 'free',
    'resources_available': {'ncpus': 64, 'ngpus': 4, 'system': 'polaris', 'debug': 'True'},
}


def nodes(vnodes: dict[str, object], **wanted: str) -> dict[str, str]:
    """State by name."""
    found = answers.parse_nodes(json.dumps({'nodes': vnodes}), 'prod', wanted)
    return {name: group.state for group in found for name in group.names}


def test_states_of_nodes() -> None:
    states: dict[str, dict[str, Any]] = {
        'idle': {}, 'job-exclusive': {'state': 'job-exclusive'}, 'mixed': {'jobs': ['1.s']},
        'down+offline': {'state': 'down,offline'}, 'resv-exclusive': {'state': 'resv-exclusive'},
    }  # fmt: skip
    for state, told in states.items():
        assert nodes({'a': {**VNODE, **told}}) == {'a': state}
    assert nodes({'a': {**VNODE, 'state': 'Stale'}}) == {'a': 'stale'}, 'as pbs_internal.h has it'
    for nothing in (None, {}, {'ncpus': 0}):  # no job gets a CPU of it
        assert nodes({'a': {**VNODE, 'resources_available': nothing}}) == {'a': 'unknown'}
    for odd in (None, 'x', {}, {'state': 5}):  # it hides no other host
        assert nodes({'a[0]': VNODE, 'a[1]': odd, 'b': VNODE}) == {'a': 'unknown', 'b': 'idle'}


def test_a_free_vnode_may_take_no_job() -> None:
    for limit, state in (
        ({'max_running': 0}, 'offline'),
        ({'max_user_run': '0'}, 'offline'),
        ({'max_group_run': 0}, 'offline'),
        ({'no_multinode_jobs': 'True'}, 'single'),
        ({'max_running': 1, 'no_multinode_jobs': 'False'}, 'idle'),
    ):
        node = {'state': 'free', 'resources_available': {'ncpus': 4}, **limit}
        [found] = answers.parse_nodes(json.dumps({'nodes': {'n1': node}}), 'batch', {})
        assert (found.state.split('+')[0], found.usable) == (state, state == 'idle')


def test_a_divided_host_is_idle_if_all_of_it_is() -> None:
    part = {'state': 'free', 'resources_available': {'ncpus': 32, 'ngpus': 2}}
    natural = {'state': 'free', 'resources_available': {'ncpus': 0}}
    busy = {**part, 'state': 'job-busy'}
    halves: dict[str, object] = {'a': natural, 'a[0]': part, 'a[1]': part}
    other = {'b': natural, 'b[0]': part, 'b[1]': busy}
    assert nodes({**halves, **other}) == {'a': 'idle', 'b': 'job-busy'}
    [group] = answers.parse_nodes(json.dumps({'nodes': halves}), 'prod', {})
    assert group == records.Nodes('prod', ('a',), 'idle', gpus=4, cpus=64)


def test_only_nodes_with_the_resources_of_a_chunk_count() -> None:
    has = {'ncpus': 64, 'debug': 'True'}
    machine: dict[str, object] = {
        'a': VNODE,
        'b': {'state': 'free', 'resources_available': {'ncpus': 32, 'system': 'polaris,other'}},
        'c': {**VNODE, 'queue': 'other'},
        'd': {**VNODE, 'resources_available': {**has, 'mem': '24684084kb', 'system': 'x'}},
    }
    assert set(nodes(machine)) == {'a', 'b', 'd'}
    assert set(nodes(machine, mem='1gb')) == set(nodes(machine, mem='23gb')) == {'d'}
    assert set(nodes(machine, mem='24gb')) == set()
    assert set(nodes(machine, system='other')) == {'b'}
    assert set(nodes(machine, debug='False')) == {'b'}  # what a node does not have is false
    assert set(nodes(machine, ncpus='64')) == {'a', 'd'}


def test_a_host_is_of_the_first_class_whose_resources_all_its_vnodes_have() -> None:
    def vnode(kind: str) -> dict[str, object]:
        return {'state': 'free', 'resources_available': {'ncpus': 32, 'gputype': kind}}

    new = vnode('a100')
    machine = {'a[0]': new, 'a[1]': new, 'b[0]': new, 'b[1]': vnode('v')}
    found = answers.parse_nodes(
        json.dumps({'nodes': machine}), 'prod', {}, classes={'new': {'gputype': 'a100'}}
    )
    assert {group.names: group.node_class for group in found} == {('a',): 'new', ('b',): ''}


def test_a_queue_and_a_node_belong_to_the_scheduler_of_their_partition() -> None:
    queues = {'batch': {}, 'part': {'partition': 'P1'}, 'own': {'hasnodes': 'True'}}
    queues['route'] = {'route_destinations': 'batch,part'}
    of = {name: answers.node_owners(name, queues) for name in queues}
    assert of['batch'] == {('', '')} and of['part'] == {('', 'P1')} and of['own'] == {('own', '')}
    assert of['route'] == {('', ''), ('', 'P1')}
    vnodes = {
        'n1': {'state': 'free', 'resources_available': {'ncpus': 4}},
        'n2': {'state': 'free', 'resources_available': {'ncpus': 4}, 'partition': 'P1'},
        'n3': {'state': 'free', 'resources_available': {'ncpus': 4}, 'queue': 'own'},
    }
    text = json.dumps({'nodes': vnodes})
    for queue, names in (('batch', 'n1'), ('part', 'n2'), ('own', 'n3'), ('route', 'n1 n2')):
        found = answers.parse_nodes(text, queue, {}, of[queue])
        assert ' '.join(name for group in found for name in group.names) == names


def test_limits_of_a_queue() -> None:
    small = {
        'queue_type': 'Execution',
        'enabled': 'True',
        'started': 'False',
        'max_queued': '[p:PBS_GENERIC=10],[o:PBS_ALL=30]',
        'resources_max': {'nodect': 24, 'walltime': '03:00:00'},
        'resources_min': {'nodect': 10, 'walltime': '00:05:00'},
    }
    # As openpbs#2677 shows it: a limit of each kind under the same name.
    text = json.dumps({'Queue': {'small': small}})
    text = text.replace('"started"', '"max_queued": "[u:PBS_GENERIC=3]", "started"')
    assert answers.limits('small', answers.parse_queues(text)['small']) == records.Partition(
        'small', False, 10800.0, 10, 24, shortest_s=300.0, most_waiting=3
    )
    with pytest.raises(records.NotUnderstood, match='small'):
        answers.limits('small', {'resources_max': {'walltime': 'soon'}})


def test_reservations() -> None:
    text = (RECORDED / 'reservations.txt').read_text()
    assert answers.parse_reservations(text) == (
        records.NodeReservation('M12.polaris', 1699535150.0, 1699538750.0, ('x1', 'x2')),
    )
    odd = 'Resv ID: R1\nreserve_start = soon\nresv_nodes = (x3:ncpus=4)\n'
    assert answers.parse_reservations(odd) == (
        records.NodeReservation('R1', 0.0, math.inf, ('x3',)),
    )
    [unread] = answers.parse_reservations(
        f'{text}resv_nodes = (x3:ncpus=4)\nreserve_rrule = FREQ=DAILY;INTERVAL=1;BYMINUTE=0,30\n'
    )[1:]
    assert unread == records.NodeReservation('R13.polaris', 1699535150.0, math.inf, ('x3',))


def test_all_occurrences_of_a_reservation() -> None:
    """As a real server answered; the first of COUNT is the one that is told."""
    found = answers.parse_reservations((ZOO / 'pbs_rstat-f-recurring.txt').read_text())
    daily, hourly = (
        [r.start_s - 1795743780 for r in found if r.name == name] for name in ('S0.vm', 'S1.vm')
    )
    assert daily == [86400 * day for day in range(4)]
    assert hourly == [7200 * number for number in range(5)]
    assert {r.end_s - r.start_s for r in found if r.nodes == ('node03',)} == {1200.0}


def test_no_occurrence_of_a_rule_is_missed() -> None:
    """``few``: and no other time is taken for one. Wall clocks change on 29 March in Berlin."""
    for rule, few in (
        ('FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,WE;COUNT=7', True),
        ('FREQ=WEEKLY;UNTIL=20260408T100000Z', True),
        ('FREQ=DAILY;BYHOUR=9,17;COUNT=4', True),
        ('FREQ=MONTHLY;INTERVAL=2;COUNT=3', True),
        ('FREQ=YEARLY;BYDAY=WE;COUNT=5', True),
        ('FREQ=YEARLY;BYMONTH=1,7;COUNT=3', False),
        ('FREQ=MONTHLY;BYMONTHDAY=11,-1;COUNT=5', False),
    ):
        begin = datetime(2026, 3, 11, 9, tzinfo=ZoneInfo('Europe/Berlin'))
        real = [at.timestamp() for at in islice(rrulestr(rule, dtstart=begin), 1, 8)]
        count = {'reserve_count': str(1 + len(real))} if 'COUNT' in rule else {}
        told = {'reserve_rrule': rule, 'Variable_List': 'A=b,PBS_TZID=Europe/Berlin', **count}
        found = later_starts(told, begin.timestamp())
        assert found == tuple(real) if few else {*found} >= {at for at in real if at <= found[-1]}


@given(
    st.lists(
        st.text(
            st.characters(
                blacklist_categories=['Cs'],
                blacklist_characters='\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029',
            )
        ),
        max_size=4,
    )
)
def test_whatever_users_have_in_their_environment_the_jobs_are_read(values: list[str]) -> None:
    variables = ''.join(f'                "V{n}":"{v}",\n' for n, v in enumerate(values))
    text = (
        '{\n    "Jobs":{\n        "7.s":{\n            "job_state":"R",\n            '
        '"Variable_List":{\n'
        + variables
        + '                "LAST":007\n            },\n            "comment":"he said "go" '
        '\\[x\\]",\n            "run_count":1\n'
        '        }\n    }\n}\n'
    )
    if '            }' in variables:
        return  # a value that looks like the end of the list
    [job] = answers.parse_jobs(text, 'pool')
    assert (job.state, job.restarts) == ('RUNNING', 1)


def test_values_that_are_no_json_become_texts() -> None:
    texts = '"a "quoted" word"', '"back\\slash \\[ \\033"', '"two\nlines"', '"tab\t"'
    for value in (*texts, '007', '1e', '"', '0x1F'):
        head = '{\n    "Jobs":{\n        "7.s":{\n            "comment":'
        text = f'{head}{value},\n            "run_count":1\n        }}\n    }}\n}}'
        found = document(text, 'qstat')['Jobs']['7.s']
        assert found['run_count'] == 1
        assert isinstance(found['comment'], str)


def test_jobs_that_get_none_of_our_nodes_have_no_partition() -> None:
    """They are no reason to give nodes back, nor do their plans end holes."""
    nodes = {
        name: {'state': 'free', 'resources_available': {'ncpus': 4, 'system': system, 'mem': '8gb'}}
        for name, system in (('x1', 'polaris,Shared'), ('x2', 'polaris'), ('x3', 'other'))
    }
    found = answers.parse_nodes(
        json.dumps({'nodes': nodes}), 'pool', {'system': 'polaris', 'mem': '1gb'}
    )
    features = {feature for group in found for feature in group.features}
    assert features == {'system=polaris', 'system=shared'}
    assert sorted(name for group in found for name in group.names) == ['x1', 'x2']
    for queue, select, partition in (
        ('small', '2:ncpus=4', 'pool'),
        ('small', 'system=polaris:ncpus=4', 'pool'),
        ('small', '2:system=Shared', 'pool'),
        ('small', '2:mem=2gb', 'pool'),
        ('small', '2:ncpus=4:system=other', ''),
        ('small', '1:system=other+1:ncpus=4', 'pool'),
        ('apart', '2:ncpus=4', ''),
    ):
        job = {'job_state': 'Q', 'queue': queue, 'Resource_List': {'nodect': 2, 'select': select}}
        text = json.dumps({'timestamp': NOW, 'Jobs': {'7': job}})
        [found_job] = answers.parse_jobs(text, 'pool', features, ('apart',))
        assert found_job.partition == partition, select
        [found_job] = answers.parse_jobs(text, 'pool')  # before nodes were seen
        assert found_job.partition == 'pool'


def test_a_job_says_how_long_it_is_and_how_many_of_an_array_may_start() -> None:
    """Without that, nodes of ours that a short job could have before a planned one were kept."""
    [job] = jobs(job_state='Q')
    assert (job.limit_s, job.tasks) == (3600.0, 1)
    # One that may be shortened starts as soon as its minimum fits; its walltime is the queue's.
    both = {'nodect': 2, 'walltime': '01:00:00', 'min_walltime': '00:05:00'}
    limits_s = [jobs(job_state=state, Resource_List=both)[0].limit_s for state in 'QR']
    assert limits_s == [300.0, 3600.0]
    for queued, running, most, tasks, state in (
        (3, 2, 99, 3, 'PENDING'),
        (0, 2, 99, 1, 'HELD'),
        (10, 1, 3, 2, 'PENDING'),
        (10, 3, 3, 1, 'HELD'),
    ):
        counts = f'Queued:{queued} Running:{running} Exiting:0 Expired:1 '
        [job] = jobs(job_state='B', array_state_count=counts, max_run_subjobs=most)
        assert (job.tasks, job.state) == (tasks, state)


FORGED = '"},"7.polaris":{"job_state":"F","substate":93,"Exit_status":1,"comment":"'


@pytest.mark.parametrize('comes_first', [True, False])
def test_of_a_job_that_is_there_twice_nothing_is_known(comes_first: bool) -> None:
    """A value of another user that was not escaped closes its job, and opens one of ours."""
    ours = {'job_state': 'R', 'exec_vnode': '(x1:ncpus=64)', 'run_count': 1}
    theirs = {'job_state': 'Q', 'comment': 'FORGED'}
    order = ('8.polaris', '7.polaris') if comes_first else ('7.polaris', '8.polaris')
    told = {'7.polaris': ours, '8.polaris': theirs, '9.polaris': {'job_state': 'Q'}}
    text = json.dumps({'Jobs': {job: told[job] for job in (*order, '9.polaris')}})
    found = answers.parse_jobs(text.replace('FORGED', FORGED), 'pool')
    assert [str(job.state) for job in sorted(found, key=lambda job: job.job_id)] == [
        'UNKNOWN', 'PENDING', 'PENDING',
    ]  # fmt: skip


def test_a_job_that_cannot_be_read_hides_no_other() -> None:
    """One that waits does so whatever a hook has written in its estimate, or as its walltime."""
    sound: dict[str, Any] = {'job_state': 'Q', 'Resource_List': {'nodect': 2}}
    odd: tuple[dict[str, Any], ...] = (
        {'estimated': {'start_time': 'UNKNOWN'}, 'Priority': None, 'run_count': ''},
        {'Resource_List': {'nodect': 2, 'walltime': 'INFINITE'}},
        {'Resource_List': {'nodect': 0, 'ncpus': 1}},
    )
    for each, state in zip(odd, ('PENDING', 'PENDING', 'UNKNOWN'), strict=True):
        found = answers.parse_jobs(json.dumps({'Jobs': {'7': sound | each, '8': sound}}), 'pool')
        told = [(job.job_id, job.state.value) for job in found]
        assert told == [('7', state), ('8', 'PENDING')]
    with pytest.raises(records.NotUnderstood):
        answers.parse_jobs(json.dumps({'Jobs': {'7': sound | odd[2]}}), 'pool')


@pytest.mark.parametrize('value', ['"x"', '1', 'null'])
def test_what_is_no_job_does_not_stand_for_one(value: str) -> None:
    text = json.dumps({'Jobs': {'7': {'job_state': 'R'}, '8': {'job_state': 'Q', 'comment': 'X'}}})
    for forged in (f'"}},"7":{value},"Z":{{"a":"', '","Resource_List":{},"Resource_List":{},"a":"'):
        found = answers.parse_jobs(text.replace('X', forged), 'pool')
        assert {job.job_id: job.state.value for job in found} == {'7': 'RUNNING', '8': 'PENDING'}


def test_a_list_of_jobs_that_is_there_twice_is_no_answer() -> None:
    text = '{"Jobs":{"7":{"job_state":"R"}},"Jobs":{"8":{"job_state":"Q"}}}'
    with pytest.raises(records.NotUnderstood):
        answers.parse_jobs(text, 'pool')
    early = '{"timestamp":5,"Jobs":{},"timestamp":9}'
    assert document(early, 'qstat')['timestamp'] == 5, 'what users write comes later'


def test_which_comments_say_that_nodes_would_not_help() -> None:
    for line in (RECORDED / 'comments.txt').read_text().splitlines():
        if line.startswith('#'):
            continue
        would, _, comment = line.partition(': ')
        blocked = would == 'no nodes would help'
        [job] = jobs(job_state='Q', comment=comment)
        assert (job.blocked, job.reason) == (blocked, comment)


@pytest.mark.parametrize(
    ('status', 'says', 'over'),
    [
        (35, 'qstat: 1.pbs Job has finished, use -x or -H to obtain historical job', {}),
        (153, 'qstat: Unknown Job Id 1.pbs', {}),
        (36, 'qstat: PBS is not configured to maintain job history', NoHistory),
        (255, 'qstat: cannot connect to server pbs (errno=15010)', SchedulerSilent),
    ],
)
def test_what_qstat_does_not_tell_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, says: str, over: Any
) -> None:
    programs(tmp_path, monkeypatch, qstat=f'echo "{says}" >&2\nexit {status}')
    pbs = Pbs(PbsOptions(queue='batch'))
    with pytest.raises(SchedulerSilent):
        pbs.jobs()
    if over == {}:
        assert pbs.history({'1.pbs': Output('n', '/o', '/e')}) == {}
        return
    with pytest.raises(over):
        pbs.history({'1.pbs': Output('n', '/o', '/e')})


QSTAT = """#!/bin/sh
case $* in -Q*) cat "$0.queues" ;; -B*) cat "$0.server" ;; *) cat "$0.jobs" ;; esac
"""


@pytest.mark.parametrize(
    ('server', 'queue', 'up', 'hidden'),
    [
        ({'scheduling': 'True', 'query_other_jobs': 'True'}, {}, True, False),
        ({'scheduling': 'False', 'query_other_jobs': 'False'}, {}, False, True),
        ({'scheduling': 'False'}, {'partition': 'P1'}, True, False),
        ({}, {}, True, False),
    ],
)
def test_a_server_may_start_no_jobs_or_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    server: dict[str, str], queue: dict[str, str], up: bool, hidden: bool,
) -> None:  # fmt: skip
    """As PBS 23.06 answers ``qstat -Bf`` (recorded), after ``qmgr -c 'set server ...'``."""
    qstat = programs(tmp_path, monkeypatch, qstat=QSTAT) / 'qstat'
    Path(f'{qstat}.queues').write_text(json.dumps({'Queue': {'q': queue}}))
    Path(f'{qstat}.server').write_text(json.dumps({'Server': {'vm': server}}, indent=4))
    found = Pbs(PbsOptions(queue='q')).queue()
    assert (found.up, found.jobs_hidden) == (up, hidden)


def test_queue_priority_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the scheduler goes through them, where it has no formula."""
    queues = {'small': {'Priority': 150}, 'large': {'queue_type': 'Execution'}}
    order = ('1', 'large', 1023), ('2', 'small', -1024), ('3', 'small', 5), ('4', 'small', 5)
    waiting = {name: {'job_state': 'Q', 'queue': q, 'Priority': p} for name, q, p in order}
    qstat = programs(tmp_path, monkeypatch, qstat=QSTAT) / 'qstat'
    Path(f'{qstat}.queues').write_text(json.dumps({'Queue': queues}))
    Path(f'{qstat}.jobs').write_text(json.dumps({'Jobs': waiting}))
    pbs = Pbs(PbsOptions(queue='large'))
    pbs.queue()
    in_order = sorted(pbs.jobs(), key=lambda job: -job.priority)
    assert [job.job_id for job in in_order] == list('3421')
