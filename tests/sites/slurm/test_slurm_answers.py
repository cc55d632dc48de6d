"""What Slurm's answers say: recorded from 22.05, and as documented for later versions."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.records import JobState, NodeReservation, NotUnderstood, Partition
from parsl_freetrain.sites.slurm import answers_json, answers_text
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.scheduler import Slurm, partition_for
from parsl_freetrain.sites.slurm.words import expand, state_of
from tests.support.programs import programs

RECORDED = Path(__file__).with_name('recorded')
NOW = 1795247731  # when they were recorded


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def record(mark: str = '0123456789abcdef', **told: str) -> str:
    """What squeue prints of a job, by the letters of its fields."""
    waits = ('4', 'PENDING', 'batch', '1', 'N/A', 'N/A', '(null)', '', 'eve', 'Priority', '3:00')
    usual = (*waits, '42', '', '', 'N/A', '(null)', '(null)', '8', '2', '4000M', 'OK', 'name')
    fields = {**dict(zip('iTPDSeYNurlQnxbvfCcmhj', usual, strict=True)), **told}
    return re.sub('%(.)', lambda field: fields[field[1]], answers_text.job_format(mark) + '\n')


def number(value: float | None) -> dict[str, object]:
    """As 23.02 and later write numbers."""
    return {'set': value is not None, 'infinite': False, 'number': value or 0}


def job_document(**changes: object) -> str:
    """The shape of 23.11 and later."""
    job = {
        'job_id': 9,
        'job_state': ['PENDING'],
        'partition': 'batch',
        'node_count': number(6),
        'start_time': number(1795248170),
        'end_time': number(1795248770),
        'preempt_time': number(0),
        'scheduled_nodes': 'node[01-05,07]',
        'nodes': '',
        'user_name': 'eve',
        'state_reason': 'Resources',
        'name': 'next',
        'restart_cnt': 0,
        'time_limit': number(10),
        'priority': number(17),
        'required_nodes': '',
        'array_task_string': '0-4%3',
        **changes,
    }
    return json.dumps(
        {'jobs': [job], 'meta': {'slurm': {'version': {'major': '23', 'minor': '11'}}}}
    )


def test_jobs_as_text() -> None:
    jobs = {job.job_id: job for job in answers_text.parse_jobs(recorded('squeue-22.05.txt'))}
    assert jobs['1'].name == 'wide|name, "x"'
    assert jobs['1'].names == ('node01', 'node02', 'node03')
    assert (jobs['5_[0-3]'].start_s, jobs['5_[0-3]'].nodes) == (None, 8)
    assert (jobs['4'].planned, jobs['4'].start_s) == ((), 1795251289.0)
    assert (jobs['5_[0-3]'].tasks, jobs['5_[0-3]'].limit_s) == (4, 180.0)
    assert [name for name, job in jobs.items() if job.blocked] == ['4'], 'it waits for a date'
    assert (jobs['7'].only, jobs['2'].only) == (('node08',), ('node04', 'node05'))
    assert {job.state for job in jobs.values()} == {'PENDING', 'RUNNING', 'COMPLETED', 'CANCELLED'}
    gpu = 'gpu:a100'
    words = {'n': 'node02', 'x': 'node[03-04]', 'b': 'gres:gpu:a100:2', 'f': 'big&new|huge'}
    [picky] = answers_text.parse_jobs(record(**words, m='2G', j='a|/|b'))
    assert (picky.only, picky.excluded, picky.gpus) == (('node02',), ('node03', 'node04'), 2)
    assert picky.features == (frozenset({'big', 'new', gpu}), frozenset({'huge', gpu}))
    assert (picky.name, picky.blocked) == ('a|/|b', False)
    assert (picky.cpus, picky.step, picky.memory) == (8, 2, 2048.0)
    [whole] = answers_text.parse_jobs(record(h='NO'))
    assert whole.cpus == 0
    [sharded] = answers_text.parse_jobs(record(b='gres:shard:2'))
    [nodes] = answers_text.parse_nodes('batch|mixed|gpu:2,shard:8(S:0,1)|(null)|4|9|a1\n')
    assert sharded.features == (frozenset({'gres/shard'}),) and nodes.have(sharded.features, 0)
    [plain] = answers_text.parse_jobs(record(m='0'))
    cpus = [
        answers_text.as_it_shares(*of).cpus
        for of in ((plain, False), (plain, True), (sharded, False))
    ]
    assert cpus == [8, 0, 0], 'no memory is all of it, and no answer counts shards'
    racks = frozenset({'rack1'}), frozenset({'rack2'})
    assert answers_text.choices_of('[rack1*2&rack2*2]', 'N/A') == racks


def test_no_user_can_write_the_record_of_another_job() -> None:
    """A name may hold whatever ends a line, for some reader or other, and records besides."""
    forged = record(mark='f' * 16, i='1', T='COMPLETED', N='node01')
    names = [f'a{end}b|c{end}1|COMPLETED|batch|' for end in '\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029']
    names += [forged, f'x\n{forged}', '|', '>\n', '\n', '']
    for name in names:
        answer = record(i='1', T='RUNNING', N='node01') + record(i='2', j=name) + record(i='3')
        ours, theirs, other = answers_text.parse_jobs(answer)
        assert (ours.job_id, ours.state, ours.names) == ('1', JobState.RUNNING, ('node01',))
        assert (theirs.job_id, theirs.name, theirs.state) == ('2', name, JobState.PENDING)
        assert (other.job_id, other.name) == ('3', 'name')


def test_of_a_job_that_is_told_twice_nothing_is_known() -> None:
    answer = record(i='1', T='RUNNING') + record(i='2') + record(i='1', T='COMPLETED')
    found = answers_text.parse_jobs(answer)
    assert [(job.job_id, str(job.state)) for job in found] == [
        ('1', 'UNKNOWN'), ('2', 'PENDING'), ('1', 'UNKNOWN'),
    ]  # fmt: skip


def test_a_job_that_cannot_be_read_hides_no_other() -> None:
    odd = record(i='1', n='node[1-')
    short = record(i='1').replace('|0123456789abcdefbatch', '')
    for said in (odd, short):
        unknown, other = answers_text.parse_jobs(said + record(i='2'))
        assert (unknown.job_id, unknown.state, other.job_id) == ('1', JobState.UNKNOWN, '2')
    with pytest.raises(NotUnderstood, match='no job'):
        answers_text.parse_jobs(odd)
    for cut in (record(i='2')[:-3], record(i='2') + record(i='3')[:40]):
        with pytest.raises(NotUnderstood, match='cut off'):
            answers_text.parse_jobs(cut)
    assert answers_text.parse_jobs('') == ()


SQUEUE = """#!/bin/sh
case "$*" in *--Format*) echo no such field >&2; exit 1;; esac
printf '%s %s\\n' "$*" "$SQUEUE_FORMAT" >>"$0.asked"
printf '%s\\n' "$SQUEUE_FORMAT" | sed 's/%i/7/; s/%T/RUNNING/; s/%D/1/; s/%Q/3/; s|%.|N/A|g'
"""


def test_the_format_is_another_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a process is there for all to read, and its environment is not."""
    squeue = programs(tmp_path, monkeypatch, squeue=SQUEUE) / 'squeue'
    monkeypatch.setenv('SQUEUE_FORMAT', '%i')
    slurm = Slurm(SlurmOptions(partition='batch', form='text'))
    for _ in range(2):
        assert [(job.job_id, job.state) for job in slurm.jobs()] == [('7', JobState.RUNNING)]
    first, second = Path(f'{squeue}.asked').read_text().splitlines()
    assert first != second
    assert first.partition(' |')[0] == second.partition(' |')[0] == ' '.join(answers_text.JOBS[1:])
    assert slurm.client.commands == {'squeue': 2}


def test_which_reasons_are_for_nodes() -> None:
    for reason in (
        'Resources',
        'Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority ...',
        'Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved',
        'ReqNodeNotAvail, UnavailableNodes:node05',
        'ReqNodeNotAvail, May be reserved for other job',
    ):
        assert not answers_text.is_blocked(reason, '(null)')
        assert answers_text.is_blocked(reason, 'course')
    held = 'BeginTime Dependency JobHeldUser JobArrayTaskLimit Licenses PartitionTimeLimit '
    for reason in f'{held} QOSMaxNodePerUserLimit AssocGrpCpuLimit'.split():
        assert answers_text.is_blocked(reason, '(null)')


@pytest.mark.parametrize(
    ('tasks', 'count'),
    [('', 1), ('3', 1), ('[0-3]', 4), ('[0-3%2]', 2), ('[1,4,9-11]', 5), ('[0-8:4]', 3),
     ('[1-2,5,...]', 3), ('0-3', 4)],
)  # fmt: skip
def test_tasks_of_an_array_that_wait(tasks: str, count: int) -> None:
    assert answers_text.tasks_of(tasks) == count


def test_a_slurm_without_gpus_tells_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = SQUEUE.replace('RUNNING', 'PENDING').replace('s/%D', 's/%P/batch/; s/%r/None/; s/%D')
    sinfo = 'printf "batch|idle|%s|(null)|4|9|n1\\n" gpu:2 "(null)"'
    programs(tmp_path, monkeypatch, squeue=pending, sinfo=sinfo)
    slurm = Slurm(SlurmOptions(partition='batch'))
    assert [nodes.gpus for nodes in slurm.nodes()] == [2, 0]
    assert [job.job_id for job in slurm.jobs()] == ['7'] and slurm.client.commands['squeue'] == 2


def test_jobs_as_a_document_of_22_05_lack_planned_nodes() -> None:
    with pytest.raises(NotUnderstood, match='planned nodes'):
        answers_json.parse_jobs(recorded('squeue-22.05.json'))


def test_jobs_as_a_document_of_23_11() -> None:
    """What the zoo's has not."""
    [job] = answers_json.parse_jobs(
        job_document(
            job_state=['RUNNING', 'COMPLETING'],
            end_time=number(None),
            preempt_time=number(1795248000),
        )
    )
    assert (job.state, job.end_s, job.reason) == ('ENDING', None, 'Preempted')
    [job] = answers_json.parse_jobs(
        job_document(cpus=number(9), memory_per_cpu=number(700), minimum_cpus_per_node=number(3))
    )
    assert (job.cpus, job.step, job.memory, job.memory_per_cpu) == (9, 3, 700.0, 700.0)
    for gres, gpus, types in (
        ({'tres_per_task': 'cpu=2,gres/gpu=1', 'tasks': number(12)}, 2, ()),
        ({'tres_per_task': 'gres/gpu:a100:1', 'tasks': number(6)}, 1, (frozenset({'gpu:a100'}),)),
        ({'tres_per_socket': 'gres/gpu:2'}, 2, ()),
        ({'tres_per_job': 'gres/gpu:h100=13'}, 3, (frozenset({'gpu:h100'}),)),
    ):
        [job] = answers_json.parse_jobs(job_document(memory_per_tres='gres/gpu:1024', **gres))
        assert (job.gpus, job.features, job.memory) == (gpus, types, gpus * 1024.0)
    for shared in (['none'], ['user'], ['topo'], 'none'):
        [job] = answers_json.parse_jobs(job_document(cpus=number(9), shared=shared))
        assert job.cpus == 0, 'it gets whole nodes'
    [job] = answers_json.parse_jobs(
        job_document(start_time={'set': True, 'infinite': True, 'number': 0})
    )
    assert job.start_s is None


def test_marks_of_states() -> None:
    for bare, marks in (('idle', '*'), ('idle', '~'), ('maint', ''), ('idle', '-')):
        [nodes] = answers_text.parse_nodes(f'gpu|{bare}{marks}|(null)|(null)|4+|2G|a1\n')
        assert (nodes.state, nodes.marks) == (bare, marks)
    [large] = answers_text.parse_nodes('gpu|mixed|(null)|(null)|1K|2T|a1\n')  # sinfo/print.c
    assert (large.cpus, large.memory) == (1024, 2 * 1024**2)
    [nodes] = answers_text.parse_nodes('gpu|allocated+|(null)|(null)|4|9|a1\n')
    assert not nodes.broken, 'it can be given back while an earlier job completes there'


def test_one_reservation_that_cannot_be_read_does_not_hide_the_others() -> None:
    right = 'ReservationName=r StartTime=100 EndTime=200 Nodes=n1 Comment=EndTime=1 Nodes=n9'
    odd = 'ReservationName=odd StartTime=tomorrow EndTime=200 Nodes=n2'
    lost = 'ReservationName=lost StartTime=100 EndTime=200 Nodes=n[1'
    text = '\n'.join((lost, odd, right))
    assert answers_text.parse_reservations(f'{text}\n') == (
        NodeReservation('lost', 100.0, 200.0, (), everywhere=True),
        NodeReservation('odd', 0.0, math.inf, ('n2',)),
        NodeReservation('r', 100.0, 200.0, ('n1',)),
    )
    with pytest.raises(NotUnderstood, match='was cut off'):
        answers_text.parse_reservations(text)


def test_a_job_of_another_cluster_of_the_federation_waits_for_nothing_here() -> None:
    [job] = answers_json.parse_jobs(job_document(job_state=['PENDING', 'REVOKED']))
    assert job.state is JobState.CANCELLED


def test_what_reserves_no_nodes() -> None:
    licences = 'ReservationName=lic StartTime=5 EndTime=9 Nodes=(null)\n'
    for text in ('No reservations in the system\n', licences):
        assert answers_text.parse_reservations(text) == ()


def test_partitions() -> None:
    found = answers_text.parse_partitions(recorded('partition-22.05.txt'))
    assert found['debug'] == Partition('debug', True, 600.0, 0, 2, 'OFF', 0.0, tier=20)
    assert (found['scavenger'].preempt_mode, found['scavenger'].grace_s) == ('CANCEL', 10.0)
    line = (
        'PartitionName=p AllowAccounts=a,b AllowQos=q DenyAccounts=c MaxNodes=UNLIMITED '
        'MaxTime=UNLIMITED MinNodes=2 State=DRAIN'
    )
    assert answers_text.parse_partitions(line)['p'] == Partition(
        'p', False, None, 2, None, accounts=('a', 'b'), denied_accounts=('c',), qos=('q',)
    )


def test_a_partition_that_starts_no_jobs_is_refused() -> None:
    text = 'PartitionName=shut MaxNodes=0 MaxTime=UNLIMITED PreemptMode=OFF State=UP\n'
    with pytest.raises(BadInput, match="'shut' starts no jobs .its MaxNodes is 0"):
        partition_for(SlurmOptions(partition='shut'), answers_text.parse_partitions(text))


def test_history_and_versions() -> None:
    ended = '1|FAILED|143:0\n2|FAILED|0:15\n3|FAILED|1:0\n4|CANCELLED by 0|0:15\n8|OUT_OF_ME+\n9|\n'
    how = 'TERMINATED', 'TERMINATED', 'FAILED', 'CANCELLED', 'OUT_OF_MEMORY'
    assert answers_text.parse_history(ended) == dict(zip('12348', how, strict=True))


@pytest.mark.parametrize(
    ('code', 'state'),
    [
        (143 << 8, JobState.TERMINATED),  # as 22.05 writes it
        (15, JobState.TERMINATED),
        (1 << 8, JobState.FAILED),
        ({'status': 'ERROR', 'return_code': 143}, JobState.TERMINATED),  # 23.02
        (
            {'status': ['SIGNALED'], 'return_code': number(0), 'signal': {'id': number(15)}},
            JobState.TERMINATED,
        ),
        ({'status': ['ERROR'], 'return_code': number(2), 'signal': {}}, JobState.FAILED),
    ],
)
def test_a_job_that_sigterm_has_ended_has_not_failed(code: object, state: JobState) -> None:
    [job] = answers_json.parse_jobs(job_document(job_state=['FAILED'], exit_code=code))
    assert job.state is state


def test_durations() -> None:
    days = {'2-00:00:00': 172800, '1-12': 129600, 'UNLIMITED': None, 'NOT_SET': None}
    days |= {'INVALID': None}
    for written, seconds in {**days, '10:00': 600, '1:02:03': 3723, '30': 1800}.items():
        assert answers_text.duration_s(written) == seconds


@pytest.mark.parametrize(
    ('gres', 'gpus'),
    [('gpu:2', 2), ('gpu:a100:4(S:0-1)', 4), ('gpu:a100:2,gpu:v100:1', 3), ('(null)', 0), ('', 0),
     ('craynetwork:4', 0), ('gres/gpu:8', 8), ('gres/gpu,craynetwork:4', 1), ('gres/gpu:v100', 1),
     ('gres:gpu', 1),  # --gres=gpu, as 22.05 tells it
     ('gpu:(null):4(S:0)', 4), ('gpu:3090:2,gpu:1g.5gb:7(IDX:0-6)', 9)],
)  # fmt: skip
def test_gpus(gres: str, gpus: int) -> None:
    assert answers_text.gpus_of(gres) == gpus


def test_a_job_of_a_document_that_cannot_be_read_hides_no_other() -> None:
    sound = json.loads(job_document())['jobs'][0]
    odd = {'job_state': [], 'scheduled_nodes': 'n[1', 'end_time': 'soon', 'tasks': 'x'}
    for name, value in odd.items():
        text = json.dumps({'jobs': [sound, sound | {'job_id': 8, name: value}]})
        assert [job.state.name for job in answers_json.parse_jobs(text)] == ['PENDING', 'UNKNOWN']
    bare = json.dumps({'jobs': [sound | {'time_limit': {'number': 5}, 'end_time': {}}]})
    assert [job.limit_s for job in answers_json.parse_jobs(bare)] == [300.0]


@pytest.mark.parametrize(
    'answer',
    ['{}', '[]', '{"jobs": [{"job_id": 1}]}', '{"jobs": 5}', '{"jobs": [], "errors": [{}]}'],
)
def test_documents_of_another_shape(answer: str) -> None:
    with pytest.raises(NotUnderstood):
        answers_json.parse_jobs(answer)


@pytest.mark.parametrize(
    ('written', 'names'),
    [
        ('node[01-03,7],login1', ['node01', 'node02', 'node03', 'node7', 'login1']),
        ('r[1-2]n[09-10]', ['r1n09', 'r1n10', 'r2n09', 'r2n10']),
        ('(null)', []),
        ('', []),
        ('nid000[098-101]', ['nid000098', 'nid000099', 'nid000100', 'nid000101']),
    ],
)
def test_node_lists(written: str, names: list[str]) -> None:
    assert list(expand(written)) == names


@pytest.mark.parametrize('written', ['a[1-2', 'a]1', 'a[x-y]', 'a[1-]', 'a[[1]]'])
def test_broken_node_lists(written: str) -> None:
    with pytest.raises(NotUnderstood):
        expand(written)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=30, unique=True))
def test_node_lists_name_every_node_once(numbers: list[int]) -> None:
    assert expand(f'cn[{",".join(f"{n:04d}" for n in numbers)}]') == tuple(
        f'cn{n:04d}' for n in numbers
    )


def test_slurms_words_for_states() -> None:
    for words, state in {
        'PENDING': 'PENDING', 'CONFIGURING': 'STARTING', 'REQUEUE_HOLD': 'HELD',
        'COMPLETING': 'ENDING', 'TIMEOUT': 'TIMED_OUT', 'CANCELLED by 0': 'CANCELLED',
        'CANCELLED+': 'CANCELLED', 'A_NEW_STATE': 'UNKNOWN', '': 'UNKNOWN',
    }.items():  # fmt: skip
        assert state_of(words) == state
    assert not JobState.UNKNOWN.is_over


def test_blocks_shrink_where_slurm_can_do_it_well() -> None:
    for tracks in ('cgroup', 'linuxproc'):
        for kept in ('accounting_storage/slurmdbd', 'accounting_storage/none', '(null)'):
            said = f'AccountingStorageType   = {kept}\nProctrackType    = proctrack/{tracks}\n'
            can = tracks == 'cgroup' and kept.endswith('slurmdbd')
            assert answers_text.can_shrink(said) == can
    assert not answers_text.can_shrink('')
