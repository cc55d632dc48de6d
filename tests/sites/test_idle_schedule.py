import gzip
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.idle_schedule import (
    IdleInterval,
    Schedule,
    read_schedule,
    write_schedule,
)
from tests.support.properties import holds_for
from tests.support.schedules import change_times, idle_at

SUMMIT = Path(__file__).resolve().parents[3] / 'shared/data/idle/summit-2021-02-week1.csv.gz'

HEADER = 'start_s,end_s,node\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / 'idle.csv'
    path.write_text(text)
    return path


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    intervals = []
    for node in draw(st.lists(st.sampled_from(['a1', 'b.2', 'c-3', 'd_4']), unique=True)):
        times = sorted(draw(st.sets(st.integers(0, 10**7).map(lambda ms: ms / 1000), max_size=8)))
        intervals += [
            IdleInterval(start, end, node)
            for start, end in zip(times[::2], times[1::2], strict=False)
        ]
    return Schedule(intervals)


def test_intervals_are_sorted_whatever_the_order_of_lines_and_columns(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeffnode,start_s,end_s\r\nb,5,7.5\r\na,5,6\r\n"c",0,1e3\r\n\r\n')
    rows = (0, 1000, 'c'), (5, 6, 'a'), (5, 7.5, 'b')
    assert read_schedule(path).intervals == tuple(IdleInterval(*row) for row in rows)


def test_a_fourth_column_has_the_nodes_classes(tmp_path: Path) -> None:
    path = written(tmp_path, 'node_class,start_s,end_s,node\na100,0,5,a\ncpu,0,9,b\na100,7,9,a\n')
    schedule = read_schedule(path)
    assert schedule.node_classes == {'a': 'a100', 'b': 'cpu'}
    assert schedule.only(['b']).scaled(2).node_classes == {'b': 'cpu'}
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule
    assert schedule != Schedule(schedule.intervals)
    with pytest.raises(BadInput, match='must be a dict with the class of each of a, b'):
        Schedule(schedule.intervals, {'a': 'a100'})


def test_touching_intervals_of_a_node_stay_two(tmp_path: Path) -> None:
    schedule = read_schedule(written(tmp_path, HEADER + '0,5,a\n5,9,a\n'))
    assert len(schedule) == 2
    assert idle_at(schedule, 5) == ('a',)


@pytest.mark.parametrize(
    ('text', 'says'),
    [
        ('', 'is empty'),
        (HEADER, 'no idle interval'),
        ('start_s,end_s\n1,2\n', 'line 1: the columns are'),
        ('{}' * 999, 'line 1: the columns are'),
        ('start_s,end_s,node,rack\n1,2,a,r\n', 'line 1: the columns are'),
        (HEADER + '0,1,a\n1,2\n', 'line 3: 2 columns'),
        (HEADER + '0,1,a,x\n', 'line 2: 4 columns'),
        (HEADER + '0,1,a\n\nsoon,2,a\n', "line 4: start_s is 'soon'"),
        (HEADER + '0,inf,a\n', "line 2: end_s is 'inf'"),
        (HEADER + 'nan,1,a\n', "line 2: start_s is 'nan'"),
        (HEADER + '0,1,a\n3,3,b\n', 'line 3: the interval ends at 3 s'),
        (HEADER + '5,3,b\n', 'line 2: the interval ends at 3 s'),
        (HEADER + '-1,3,b\n', 'line 2: the interval starts at -1 s'),
        (
            HEADER + '0,1,a\n4,8,b\n1,5,b\n',
            'line 3: node b is idle from 4 s on, but already since 1 s',
        ),
        (HEADER[:-1] + ',node_class\n0,1,a\n', 'line 2: 3 columns where there must be 4'),
        (HEADER[:-1] + ',node_class\n0,1,a,\n', "line 2: the node class is ''"),
        (HEADER[:-1] + ',node_class\n0,1,a,x\n2,3,a,y\n', "line 3: node a is of the class 'y'"),
        (HEADER[:-1] + ',node\n0,1,a,a\n', 'line 1: the columns are'),
        (HEADER + '0,1,../a\n', "line 2: the node name is '../a'"),
        (HEADER + '0,1,\n', "line 2: the node name is ''"),
    ],
)
def test_bad_schedule_gets_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as raised:
        read_schedule(path)
    message = str(raised.value)
    assert says in message and str(path) in message and len(message) < 400
    assert message.endswith('.') and '\n' not in message


def test_unreadable_files_get_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / 'idle.csv.gz'
    broken.write_bytes(gzip.compress(HEADER.encode() * 100)[:-20])
    binary = tmp_path / 'idle.bin'
    binary.write_bytes(b'\xff\xfe\x00')
    for path in (broken, binary, tmp_path, tmp_path / 'absent.csv'):
        with pytest.raises(BadInput, match='start_s,end_s,node'):
            read_schedule(path)


def test_what_is_made_in_code_is_checked_too() -> None:
    with pytest.raises(BadInput, match='must not overlap'):
        Schedule([IdleInterval(0, 5, 'a'), IdleInterval(4, 8, 'a')])
    for factor in (0, -1, math.inf, math.nan):
        with pytest.raises(BadInput, match='time factor'):
            Schedule([IdleInterval(0, 9, 'b')]).scaled(factor)


@pytest.mark.parametrize('name', ['idle.csv', 'idle.csv.gz'])
@holds_for(tries=30, schedule=schedules())
def test_what_was_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, schedule: Schedule
) -> None:
    path = tmp_path_factory.mktemp('schedule') / name
    write_schedule(schedule, path)
    first = path.read_bytes()
    if len(schedule):
        assert read_schedule(path) == schedule
    write_schedule(schedule, path)
    assert path.read_bytes() == first


@holds_for(tries=50, schedule=schedules(), factor=st.sampled_from([0.5, 2.0, 64.0]))
def test_idle_nodes_and_seconds_agree_with_intervals(schedule: Schedule, factor: float) -> None:
    total = sum(interval.end_s - interval.start_s for interval in schedule.intervals)
    times = change_times(schedule)
    assert sum(len(idle_at(schedule, a)) * (b - a) for a, b in pairwise(times)) == pytest.approx(
        total
    )
    scaled = schedule.scaled(factor)
    assert change_times(scaled) == tuple(factor * t for t in times)
    assert all(idle_at(scaled, factor * t) == idle_at(schedule, t) for t in times)


def test_first_nodes_and_only() -> None:
    schedule = Schedule([IdleInterval(0, 9, 'b'), IdleInterval(1, 2, 'a'), IdleInterval(3, 4, 'c')])
    assert schedule.nodes[:2] == ('a', 'b')
    assert schedule.only(['c', 'a']).intervals == (IdleInterval(1, 2, 'a'), IdleInterval(3, 4, 'c'))


@pytest.mark.skipif(not SUMMIT.exists(), reason='the public Summit trace is not here')
def test_reads_a_week_of_summit() -> None:
    schedule = read_schedule(SUMMIT)
    assert len(schedule) == 209_196
    assert schedule.end_s == 604_800
    idle_s = float((schedule.ends - schedule.starts).sum())
    assert idle_s == pytest.approx(344.826 * 604_800, rel=1e-5)
