"""Job logs of three kinds come down to the same table, and bad ones get a sentence."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.accounting_pbs import read_pbs
from parsl_freetrain.replay.accounting_slurm import read_sacct
from parsl_freetrain.replay.job_table import JobTable
from parsl_freetrain.replay.read import read_trace
from parsl_freetrain.replay.swf import read_swf

INF = math.inf

SWF = """\
; Version: 2.2
; MaxNodes: 4 (compute)
; MaxProcs: 8

1 1000 10 50 3 -1 -1 4 100 -1 1 1 1 -1 1 -1 -1 -1
2 1005 100 20.5 -1 -1 -1 8 30 -1 0 1 1 -1 1 -1 -1 -1
3 1010 -1 -1 -1 -1 -1 4 30 -1 5 1 1 -1 1 -1 -1 -1
4 1020 40 0 2 -1 -1 2 -1 -1 5 1 1 -1 1 -1 -1 -1
"""

SACCT = """\
JobIDRaw|State|Submit|Eligible|Start|End|NNodes|Timelimit|NodeList
7|COMPLETED|2026-03-01T00:00:00|2026-03-01T00:00:00|2026-03-01T00:00:10|2026-03-01T00:01:00|2|\
00:01:40|cn[01-02]
7.batch|COMPLETED|2026-03-01T00:00:10|2026-03-01T00:00:10|2026-03-01T00:00:10|2026-03-01T00:01:00|1||cn01
8|RUNNING|2026-03-01T00:00:05|2026-03-01T00:00:30|2026-03-01T00:01:45|Unknown|4|1-02:00:00|cn[01-02],gpu[1,3]
9|PENDING|2026-03-01T00:00:20|Unknown|Unknown|Unknown|3|UNLIMITED|None assigned
10|CANCELLED by 5|2026-03-01T00:00:20|2026-03-01T00:00:20|None|2026-03-01T00:01:00|1|\
Partition_Limit|None assigned
"""

PBS = """\
03/01/2026 00:00:00;L;license;floating license hour:0 day:0 month:0
03/01/2026 00:00:10;S;7.pbs;user=a start=1010 etime=1000 \
exec_host=n1/0*24+n2/0*24 Resource_List.walltime=00:01:40
03/01/2026 00:01:00;E;7.pbs;user=a group="a b" jobname=x=y ctime=999 qtime=999 etime=1000 \
start=1010 exec_host=n1/0*24+n2/0*24+n2/1 \
exec_vnode=(n1:ncpus=24)+(n2:ncpus=24) Resource_List.nodect=2 \
Resource_List.walltime=00:01:40 end=1060 Exit_status=0
03/01/2026 00:01:00;R;8.pbs;user=a qtime=1005 start=1020 end=1050 \
exec_vnode=(n3[0]:ncpus=1+n3[1]:ncpus=1)+(n4:ncpus=2) \
Resource_List.walltime=90
03/01/2026 00:01:10;S;8.pbs;user=a qtime=1005 start=1070 exec_host=n3/0 Resource_List.walltime=90
03/01/2026 00:01:10;D;9.pbs;requestor=a@x
"""


def written(tmp_path: Path, text: str, name: str = 'log') -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def rows(found: JobTable) -> list[tuple[float, ...]]:
    columns = (found.submit, found.start, found.end, found.nodes, found.requested)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def places(found: JobTable) -> list[list[str] | None]:
    places = [None if nodes is None else nodes.tolist() for nodes in found.placed]
    return [None if one is None else [found.machine[i] for i in one] for one in places]


def test_swf_in_whole_nodes_from_the_first_submission_on(tmp_path: Path) -> None:
    found = read_swf(written(tmp_path, SWF))
    assert found.machine == ('node0', 'node1', 'node2', 'node3')
    # Two processors a node; asked for where not allocated; without a wait: left out; cancelled: no
    # run; no request: no limit.
    assert rows(found) == [(0, 10, 60, 2, 100), (5, 105, 125.5, 4, 30), (20, 60, 60, 1, INF)]
    assert places(found) == [None] * 3
    assert found.line.tolist() == [5, 6, 8]
    assert found.window == (10, 105)
    unsized = written(tmp_path, SWF.replace('MaxNodes', 'Nodes'))
    assert len(read_swf(unsized, machine_nodes=8).machine) == 8


def test_untidy_swf_gets_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head, lines = SWF.split('\n\n')
    tidy = read_swf(written(tmp_path, SWF))
    assert not caplog.records
    # Ordered by end, as the public log of Theta of 2023 is; the first job in five columns only.
    first, *others = lines.splitlines()
    untidy = [*reversed(others), ' '.join(first.split()[:5]), '5 1030 1 1 13 -1 -1 13 1']
    path = written(tmp_path, '\n'.join([head, *untidy, '']))
    found = read_swf(path)
    assert [record.getMessage() for record in caplog.records] == [
        f'{path}: 3 lines were submitted before the line above (sorted); 2 lines have fewer than '
        '18 columns (the others are unknown); 1 jobs have more than the 4 nodes of the header '
        '(the machine has 7, then).'
    ]
    assert len(found.machine) == 7
    first_row, *rest = rows(tidy)
    assert rows(found) == [(*first_row[:4], INF), *rest, (30, 31, 32, 7, 1)]
    with pytest.raises(BadInput, match='the job has 7 nodes; the machine has 4'):
        read_swf(path, machine_nodes=4)


def test_odd_lines_of_swf_are_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tidy = rows(read_swf(written(tmp_path, SWF)))
    first = SWF.splitlines()[4]
    nothing = '5 1030 1 1 -1 -1 -1 -1 1 -1 1 1 1 -1 1 -1 -1 -1\n'
    part = ' '.join('2' if at == 10 else word for at, word in enumerate(first.split())) + '\n'
    comma = SWF.replace('MaxNodes: 4', 'MaxNodes: 1,004').replace('Procs: 8', 'Procs: 2,008')
    found = read_swf(written(tmp_path, comma + nothing + part))
    assert len(found.machine) == 1004
    assert len(found) == len(tidy)
    [record] = caplog.records
    assert '1 lines are parts of jobs (left out)' in record.getMessage()
    assert '1 jobs ran on no known number of processors (left out)' in record.getMessage()


def test_a_job_that_was_cancelled_before_it_had_nodes_does_not_refuse_sacct(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (
        'JobID|Submit|Start|End|AllocNodes|Timelimit|NodeList\n'
        '1|1000|1010|1060|1|01:00:00|n1\n2|1005|Unknown|1070|0|01:00:00|None assigned\n'
        '3|1020|1060|1070|1|01:00:00|n2\n'
    )
    assert len(read_sacct(written(tmp_path, text))) == 2
    assert '1 jobs that never ran have no nodes; left out' in caplog.text


def test_the_records_of_an_array_itself_count_no_nodes(tmp_path: Path) -> None:
    alone = read_pbs(written(tmp_path, PBS))
    stamp, _, _, rest = next(line for line in PBS.splitlines() if ';E;' in line).split(';', 3)
    array = re.sub(r'exec_\w+=\S+ ', '', f'{stamp};E;7[].server;{rest}')
    assert rows(read_pbs(written(tmp_path, f'{PBS}{array}\n'))) == rows(alone)


def test_sacct_without_steps_and_with_node_lists(tmp_path: Path) -> None:
    found = read_sacct(written(tmp_path, SACCT))
    assert found.machine == ('cn01', 'cn02', 'gpu1', 'gpu3')
    listed = [(0, 10, 60, 2, 100), (20, INF, INF, 3, INF), (20, 60, 60, 1, INF)]
    assert rows(found) == [*listed, (30, 105, INF, 4, 93_600)]
    assert places(found) == [['cn01', 'cn02'], None, None, ['cn01', 'cn02', 'gpu1', 'gpu3']]
    assert [len(read_sacct(tmp_path / 'log', n).machine) for n in (4, 6)] == [4, 6]


def test_sacct_in_seconds_without_node_lists(tmp_path: Path) -> None:
    text = (
        'JobID|Submit|Start|End|AllocNodes|TimelimitRaw\n'
        '1|1000|1010|1060|2|2\n1.0|1000|1010|1060|2|\n2|1005|1060|1070|1K|\n'
    )
    found = read_sacct(written(tmp_path, text), 2000)
    assert rows(found) == [(0, 10, 60, 2, 120), (5, 60, 70, 1024, INF)]
    words = 'line 2: the log names no nodes for this job; say how many nodes the machine has'
    with pytest.raises(BadInput, match=words):
        read_sacct(tmp_path / 'log')


def test_pbs_ended_requeued_and_running_jobs(tmp_path: Path) -> None:
    found = read_pbs(written(tmp_path, PBS))
    assert found.machine == ('n1', 'n2', 'n3', 'n4')
    assert rows(found) == [(0, 10, 60, 2, 100), (5, 20, 50, 2, 90), (5, 70, INF, 1, 90)]
    assert places(found) == [['n1', 'n2'], ['n3', 'n4'], ['n3']]


def test_pbs_logs_of_several_days_are_one(tmp_path: Path) -> None:
    lines = PBS.splitlines(keepends=True)
    days = [
        written(tmp_path, ''.join(part), name)
        for name, part in (('20260301', lines[:2]), ('20260302', lines[2:]))
    ]
    assert rows(read_pbs(days)) == rows(read_pbs(written(tmp_path, PBS)))


def test_the_same_jobs_give_the_same_holes_from_every_kind_of_log(tmp_path: Path) -> None:
    found = {
        'swf': read_trace(
            written(
                tmp_path,
                '; MaxNodes: 2\n'
                + ''.join(
                    f'{i} {s} {w} {r} {n} -1 -1 {n} {q} -1 1 -1 -1 -1 -1 -1 -1 -1\n'
                    for i, s, w, r, n, q in (
                        (1, 1000, 0, 50, 1, 100),
                        (2, 1000, 0, 10, 1, 10),
                        (3, 1005, 45, 20, 2, 20),
                        (4, 1200, 0, 5, 1, 5),
                    )
                ),
            )
        ),
        'sacct': read_trace(
            written(
                tmp_path,
                'JobID|Submit|Start|End|NNodes|TimelimitRaw|Timelimit|NodeList\n'
                + ''.join(
                    f'{i}|{s}|{b}|{e}|{n}||00:{q}|{names}\n'
                    for i, s, b, e, n, q, names in (
                        (1, 1000, 1000, 1050, 1, '01:40', 'node0'),
                        (2, 1000, 1000, 1010, 1, '00:10', 'node1'),
                        (3, 1005, 1050, 1070, 2, '00:20', 'node[0-1]'),
                        (4, 1200, 1200, 1205, 1, '00:05', 'node0'),
                    )
                ),
            )
        ),
        'pbs': read_trace(
            written(
                tmp_path,
                ''.join(
                    f'01/01/2026 00:00:00;E;{i};etime={s} start={b} end={e} '
                    f'exec_host={names} Resource_List.walltime={q}\n'
                    for i, s, b, e, q, names in (
                        (1, 1000, 1000, 1050, '0:1:40', 'node0/0'),
                        (2, 1000, 1000, 1010, '0:0:10', 'node1/0'),
                        (3, 1005, 1050, 1070, '0:0:20', 'node0/0+node1/0'),
                        (4, 1200, 1200, 1205, '0:0:5', 'node0/0'),
                    )
                ),
            )
        ),
    }
    for trace in found.values():
        assert trace.names == ('node0', 'node1')
        columns = [column.tolist() for column in (trace.starts, trace.ends, trace.nodes)]
        assert columns == [[10, 70, 70], [50, 200, 200], [1, 0, 1]]
        assert trace.known_until.tolist() == [100, INF, INF]


def test_part_of_a_log_and_errors_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, SWF)
    part = read_trace(path, nodes=3, since=60, until=100, machine_nodes=4)
    assert (part.names, part.start_s, part.end_s) == (('node0', 'node1', 'node2'), 60, 100)
    assert part.idle_node_s() == 3 * 40
    for arguments, says in (
        ({'since': 500}, 'nothing between 500 s and 105 s'),
        ({'machine_nodes': 3}, 'line 6: the job has 4 nodes'),
    ):
        with pytest.raises(BadInput, match=says) as raised:
            read_trace(path, **arguments)
        assert str(path) in str(raised.value)
    idle = written(tmp_path, 'start_s,end_s,node\n0,5,a\n', 'idle.csv')
    with pytest.raises(BadInput, match='goes with job logs only'):
        read_trace(idle, machine_nodes=3)
    for missing in (tmp_path / 'absent', tmp_path):
        with pytest.raises(BadInput, match='give idle intervals, or a job log'):
            read_trace(missing)


BAD = {
    read_swf: [
        ('1 2 3\n', 'line 1: 3 columns; the columns must be the 18'),
        (
            SWF + '5 1030 1 1 1 -1 -1 1 1 -1 1 1 1 - 1 -1 -1 -1\n',
            "line 9: column 14 (executable) is '-'",
        ),
        (
            SWF + '5 1030 1641061236 60 1 -1 -1 1 1 -1 1 1 1 -1 1 -1 -1 -1\n',
            'line 9: column 3 (wait time) is 1641061236 s',
        ),
        (
            SWF + '5 1030 1 1 1 -1 -1 1 1 -1 64 1 1 -1 1 -1 -1 -1\n',
            'line 9: column 11 (status) is 64',
        ),
        (
            SWF + '5 1030 1 1 nan -1 -1 1 1 -1 1 1 1 -1 1 -1 -1 -1\n',
            "line 9: column 5 (allocated processors) is 'nan'; it must be a number",
        ),
        (
            SWF + '5 1030 1 1 1.5 -1 -1 1 1 -1 1 1 1 -1 1 -1 -1 -1\n',
            'line 9: column 5 (allocated processors) is 1.5',
        ),
        (
            SWF + '5 1030 1 1 17 -1 -1 17 1 -1 1 1 1 -1 1 -1 -1 -1\n',
            'line 9: the job has 9 nodes; the machine has 4',
        ),
        (SWF.replace('MaxNodes', 'Nodes'), 'MaxNodes'),
        (SWF.splitlines()[1] + '\n', 'has no jobs'),
        ('', 'has no jobs'),
    ],
    read_sacct: [
        ('', 'is empty'),
        (SACCT.replace('|NNodes|', '|Nodes|'), 'line 1: there is no column NNodes or AllocNodes'),
        (
            SACCT.replace('|Timelimit|', '|Limit|'),
            'line 1: there is no column Timelimit or TimelimitRaw',
        ),
        (SACCT + '11|COMPLETED\n', 'line 7: 2 columns where the header has 9'),
        (
            SACCT.replace(
                '2026-03-01T00:00:10|2026-03-01T00:01:00|2|', 'soon|2026-03-01T00:01:00|2|'
            ),
            "line 2: Start is 'soon'",
        ),
        (
            SACCT.replace('2026-03-01T00:00:00|2026-03-01T00:00:00|', 'Unknown|Unknown|'),
            "line 2: Submit is 'Unknown'",
        ),
        (SACCT.replace('cn[01-02]\n', 'cn[01-02\n'), 'line 2: the brackets'),
        (SACCT.replace('00:01:40', 'long'), "line 2: 'long' is not a duration"),
        (
            SACCT.replace('|3|UNLIMITED', '|three|UNLIMITED'),
            "line 5: the number of nodes is 'three'",
        ),
        (
            SACCT.replace('T00:00:10|2026-03-01T00:01:00|2|', 'T00:00:10|2026-02-01T00:01:00|2|'),
            'line 2: the job was submitted at',
        ),
    ],
    read_pbs: [
        (PBS + 'what\n', 'line 7: this is no record of PBS'),
        (PBS.replace(' end=1060', ''), 'line 3: the record has no end'),
        (
            PBS.replace('start=1010 exec_host=n1/0*24+n2/0*24+', 'start=soon exec_host='),
            "line 3: start is 'soon'",
        ),
        (
            PBS.replace('exec_vnode=(n3[0]:ncpus=1+n3[1]:ncpus=1)+(n4:ncpus=2)', ''),
            'line 4: the record has no Resource_List.nodect',
        ),
        (
            PBS.replace('walltime=90', 'walltime=1:30:x'),
            "line 4: Resource_List.walltime is '1:30:x'",
        ),
    ],
}


@pytest.mark.parametrize(
    ('read', 'text', 'says'), [(read, *each) for read, bad in BAD.items() for each in bad]
)
def test_bad_logs_get_a_sentence(
    tmp_path: Path, read: Callable[[Path], JobTable], text: str, says: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as raised:
        read(path)
    assert says in str(raised.value) and str(path) in str(raised.value)
