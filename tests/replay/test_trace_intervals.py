import gzip
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.read import read_trace
from parsl_freetrain.replay.trace import PoolChange, Trace
from tests.support.properties import holds_for

SUMMIT = Path(__file__).resolve().parents[3] / 'shared/data/idle/summit-2021-02-week1.csv.gz'
HEADER = 'start_s,end_s,node\n'

Row = tuple[float, float, int, float]


def trace(rows: list[Row], names: str = 'abcd', since: float = 0, until: float = 100) -> Trace:
    starts, ends, nodes, known = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = np.array(starts), np.array(ends), np.array(nodes, dtype=np.int64), np.array(known)
    return Trace(tuple(names), since, until, *columns)


def rows_of(found: Trace, known_ends: bool | None = None) -> list[Row]:
    columns = (
        (found.starts, found.ends, found.nodes, found.known_until)
        if known_ends is None
        else found.intervals(known_ends)
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def back(changes: tuple[PoolChange, ...], until: float) -> list[Row]:
    """The intervals that changes tell of."""
    since: dict[int, tuple[float, float]] = {}
    found = []
    for change in changes:
        for node in change.left.tolist():
            start, known = since.pop(node)
            found.append((start, change.at, node, known))
        for node, known in zip(change.joined.tolist(), change.known_until.tolist(), strict=True):
            assert node not in since
            since[node] = (change.at, known)
    found += [(start, until, node, known) for node, (start, known) in since.items()]
    return sorted(found, key=lambda row: (row[0], row[2]))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Intervals with promises that were kept, broken, or none, and touching ones."""
    rows: list[Row] = []
    for node in range(draw(st.integers(1, 4))):
        times = sorted(draw(st.sets(st.integers(0, 100), min_size=2, max_size=8)))
        for start, end in pairwise(times):
            if draw(st.booleans()):
                known = draw(st.sampled_from([start, end, end + 3, math.inf]))
                rows.append((start, end, node, known))
    return trace(rows)


@holds_for(traces(), st.booleans(), tries=100)
def test_intervals_come_back_and_no_node_second_is_lost(found: Trace, known_ends: bool) -> None:
    changes = found.changes(known_ends)
    assert [change.at for change in changes] == sorted({change.at for change in changes})
    assert all(len(change.joined) or len(change.left) for change in changes)
    assert back(changes, 100) == rows_of(found, known_ends)
    pool, before, total = 0, 0.0, 0.0
    for change in changes:
        total += pool * (change.at - before)
        before, pool = change.at, pool + len(change.joined) - len(change.left)
    assert total + pool * (100 - before) == pytest.approx(found.idle_node_s(known_ends))


@holds_for(traces(), tries=100)
def test_knowing_the_ends_takes_only_what_was_promised(found: Trace) -> None:
    assert found.idle_node_s() == pytest.approx(float((found.ends - found.starts).sum()))
    known = [(start, min(end, until)) for start, end, _, until in rows_of(found) if until > start]
    promised = sum(end - start for start, end in known)
    assert found.idle_node_s(known_ends=True) == pytest.approx(promised)


@holds_for(traces(), st.floats(-10, 110), st.integers(1, 5), tries=100)
def test_two_windows_have_what_the_whole_has(found: Trace, cut: float, nodes: int) -> None:
    total = 0.0
    for since, until in ((None, cut), (cut, None)):
        try:
            total += found.window(nodes, since, until).idle_node_s()
        except BadInput:
            continue
    kept = found.nodes < nodes
    assert total == pytest.approx(float((found.ends - found.starts)[kept].sum()))


def test_a_promise_that_ran_out_and_was_renewed_is_an_end_only_for_one_who_knows_of_it() -> None:
    found = trace([(0, 5, 0, 5), (5, 7, 0, 5), (7, 20, 0, 30)])
    assert rows_of(found, known_ends=False) == [(0, 20, 0, math.inf)]
    assert rows_of(found, known_ends=True) == [(0, 5, 0, 5), (7, 20, 0, 30)]


def test_a_window_keeps_the_clock_and_the_first_names(tmp_path: Path) -> None:
    path = tmp_path / 'idle.csv.gz'
    path.write_bytes(gzip.compress((HEADER + '0,50,n3\n10,20,n1\n30,40,n2\n').encode()))
    whole = read_trace(path)
    assert (whole.names, whole.start_s, whole.end_s) == (('n1', 'n2', 'n3'), 0, 50)
    part = read_trace(path, nodes=2, since=15, until=35)
    assert (part.names, part.start_s, part.end_s) == (('n1', 'n2'), 15, 35)
    assert rows_of(part) == [(15, 20, 0, math.inf), (30, 35, 1, math.inf)]
    assert read_trace(path, nodes=99).idle_node_s() == whole.idle_node_s() == 70


@pytest.mark.parametrize(
    ('lines', 'part', 'says'),
    [
        ('0,9,a\n5,3,b\n', {}, 'line 3: the interval ends at 3 s'),
        ('0,9,a\n5,12,a\n', {}, 'line 3: node a is idle from 5 s on, but already since 0 s'),
        ('0,9,a\n', {'since': 9}, 'nothing between 9 s and 9 s'),
        ('0,9,a\n', {'since': 7, 'until': 3}, 'nothing between 7 s and 3 s'),
        (
            '0,9,a\n20,30,a\n',
            {'since': 10, 'until': 15},
            'None of 1 nodes is idle from 10 s to 15 s',
        ),
        ('0,9,a\n', {'nodes': 0}, 'first 0 nodes'),
        ('0,9,a\n', {'since': math.nan}, 'nothing between nan s and 9 s'),
    ],
)
def test_bad_intervals_and_empty_windows_get_a_sentence(
    tmp_path: Path, lines: str, part: dict[str, float], says: str
) -> None:
    path = tmp_path / 'idle.csv'
    path.write_text(HEADER + lines)
    with pytest.raises(BadInput) as raised:
        read_trace(path, **part)  # type: ignore[arg-type]
    assert says in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_trace_made_in_code_is_checked_too() -> None:
    rows = (5, 5, 0), (-1, 5, 0), (0, 101, 0), (0, 5, 4)
    for row in (*((*each, math.inf) for each in rows), (0, 5, 0, math.nan)):
        with pytest.raises(BadInput):
            trace([row])
        with pytest.raises(BadInput, match='Node b is idle'):
            trace([(0, 9, 1, math.inf), (8, 20, 1, math.inf)])


@pytest.mark.long
@pytest.mark.skipif(not SUMMIT.exists(), reason='the public Summit trace is not here')
def test_a_week_of_summit() -> None:
    week = read_trace(SUMMIT)
    assert (len(week), len(week.names), week.end_s) == (209_196, 4651, 604_800)
    assert week.idle_node_s() / 604_800 == pytest.approx(344.826, rel=1e-5)
    # At 400,000 s, counted by another program: zcat … | awk -F, '$1<=400000 && 400000<$2' | wc -l
    early = [change for change in week.changes() if change.at <= 400_000]
    assert sum(len(change.joined) - len(change.left) for change in early) == IDLE_AT_400_000_S


IDLE_AT_400_000_S = 627
