"""Node-seconds: interval arithmetic against counting second by second."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from parsl_freetrain.ledger.intervals import Interval, clip, intersect, length, merge, subtract
from parsl_freetrain.ledger.rows import (
    BlockRow,
    CheckpointRow,
    FragmentRow,
    NodeRow,
    Offer,
    RunHistory,
    RunRow,
)
from parsl_freetrain.ledger.timeline import killed_blocks, node_seconds_of
from tests.support.properties import holds_for

LAST = 30
seconds = st.integers(0, LAST)
maybe = st.none() | seconds
spans = st.lists(
    st.tuples(seconds, seconds).map(lambda ab: (float(ab[0]), float(ab[1]))), max_size=6
)


@st.composite
def stories(draw: st.DrawFn) -> RunHistory:
    """Anything a confused writer might say: times in any order, overlaps, unknown nodes, missing
    ends.
    """
    names = ('x', 'y')
    runs = []
    rows: dict[str, list[object]] = {
        kind: [] for kind in ('blocks', 'nodes', 'fragments', 'checkpoints', 'offers')
    }
    for run in range(draw(st.integers(1, 2))):
        begun = draw(seconds)
        runs.append(
            RunRow(
                run,
                f'r{run}',
                begun,
                draw(st.none() | st.integers(begun, LAST)),
                None,
                draw(st.integers(begun, LAST)),
            )
        )
        for b in range(draw(st.integers(0, 3))):
            chosen = tuple(draw(st.lists(st.sampled_from(names), max_size=2, unique=True)))
            rows['blocks'].append(
                BlockRow(
                    run, f'b{b}', draw(seconds), names=chosen, closed_at=draw(maybe), how='taken'
                )
            )
            for n in range(draw(st.integers(0, 2))):
                name = draw(st.sampled_from(names))
                rows['nodes'].append(
                    NodeRow(run, f'b{b}n{n}', f'b{b}', name, draw(seconds), draw(maybe))
                )
        for f in range(draw(st.integers(0, 4))):
            on = tuple(
                draw(
                    st.lists(
                        st.sampled_from(['b0n0', 'b0n1', 'b1n0', 'b1n1', 'x']),
                        max_size=3,
                        unique=True,
                    )
                )
            )
            ending = draw(st.sampled_from(['finished', 'stopped', 'preempted', 'failed']))
            rows['fragments'].append(
                FragmentRow(
                    run,
                    'a',
                    f,
                    draw(seconds),
                    nodes=on,
                    started_at=draw(maybe),
                    ended_at=draw(maybe),
                    ending=ending,
                )
            )
            for _ in range(draw(st.integers(0, 2))):
                rows['checkpoints'].append(
                    CheckpointRow(
                        run,
                        'a',
                        f,
                        draw(seconds),
                        0,
                        seconds=draw(st.integers(0, 4)),
                        pause_s=draw(st.integers(0, 4)),
                    )
                )
        for _ in range(draw(st.integers(0, 3))):
            rows['offers'].append(
                Offer(run, draw(st.sampled_from(names)), draw(seconds), draw(maybe))
            )
    return RunHistory(tuple(runs), latest=len(runs) - 1, **{k: tuple(v) for k, v in rows.items()})  # type: ignore[arg-type]


def counted(history: RunHistory, now: float | None) -> dict[str, int]:
    """The same classes, told second by second straight from their definitions."""
    totals = dict.fromkeys(('offered', 'trained', 'starting', 'checkpointing', 'lost', 'idle'), 0)
    for run in history.runs:
        alive = run.ended_at is None and run.id == history.latest
        until = (
            run.ended_at
            if run.ended_at is not None
            else max(run.last_at, now)
            if alive and now
            else run.last_at
        )
        for name in {o.name for o in history.offers if o.run == run.id}:
            for t in range(int(run.begun_at), int(until)):
                if any(
                    o.run == run.id
                    and o.name == name
                    and o.start <= t < (math.inf if o.end is None else o.end)
                    for o in history.offers
                ):
                    totals['offered'] += 1
                    kinds = _kinds(history, run.id, alive, until, name, t)
                    order = ('lost', 'checkpointing', 'trained', 'starting')
                    totals[next((k for k in order if k in kinds), 'idle')] += 1
    return totals


def _kinds(history: RunHistory, run: int, alive: bool, until: float, name: str, t: int) -> set[str]:
    kinds: set[str] = set()
    blocks = {b.block: b for b in history.blocks if b.run == run}
    nodes = {n.node: n for n in history.nodes if n.run == run}
    for node in nodes.values():
        if node.name == name and blocks[node.block].opened_at <= t < node.joined_at:
            kinds.add('starting')
    for block in blocks.values():
        never = name in block.names and not any(
            n.block == block.block and n.name == name for n in nodes.values()
        )
        if never and block.opened_at <= t < (
            block.closed_at if block.closed_at is not None else until
        ):
            kinds.add('starting')
    for f in history.fragments:
        if f.run != run:
            continue
        for one in f.nodes:
            place = nodes.get(one)
            if (place.name if place else one) != name:
                continue
            if place:
                closed = blocks[place.block].closed_at
                gone = min([until] + [x for x in (place.left_at, closed) if x is not None])
                if not place.joined_at <= t < gone:
                    continue
            ended = max(f.decided_at, until if f.ended_at is None else f.ended_at)
            if f.decided_at <= t < ended:
                kinds.add(_kind(history, f, alive, ended, t))
    return kinds


def _kind(history: RunHistory, f: FragmentRow, alive: bool, ended: float, t: int) -> str:
    started = ended if f.started_at is None else min(max(f.decided_at, f.started_at), ended)
    if t < started:
        return 'starting'
    mine = [c for c in history.checkpoints if (c.run, c.fragment) == (f.run, f.fragment)]
    ending = f.ending if f.ended_at is not None else None if alive else 'preempted'
    if ending in ('preempted', 'failed') and not any(still(c)[1] > t for c in mine):
        return 'lost'
    saves = any(still(c)[0] <= t < still(c)[1] for c in mine)
    return 'checkpointing' if saves else 'trained'


def still(c: CheckpointRow) -> tuple[float, float]:
    if c.pause_s < c.seconds:  # it was copied, and then written beside training
        return c.at - c.seconds - c.pause_s, c.at - c.seconds
    return c.at - c.pause_s, c.at


@holds_for(stories(), maybe, tries=300)
def test_every_offered_second_counts_once_in_the_right_class(
    history: RunHistory, now: int | None
) -> None:
    found = node_seconds_of(history, now)
    assert found == counted(history, now)
    assert found['offered'] == sum(v for k, v in found.items() if k != 'offered')


@holds_for(spans, spans, tries=150)
def test_interval_sets_behave_as_sets_of_seconds(
    left: list[Interval], right: list[Interval]
) -> None:
    def seconds_in(intervals: list[Interval]) -> set[int]:
        return {t for a, b in intervals for t in range(int(a), int(b))}

    one, two = merge(left), merge(right)
    assert seconds_in(one) == seconds_in(left) and length(one) == len(seconds_in(left))
    assert seconds_in(intersect(one, two)) == seconds_in(left) & seconds_in(right)
    assert seconds_in(subtract(one, two)) == seconds_in(left) - seconds_in(right)
    assert seconds_in(clip(left, 5.0, 20.0)) == seconds_in(left) & set(range(5, 20))
    for found in (one, intersect(one, two), subtract(one, two)):
        assert all(a < b for a, b in found) and all(a[1] <= b[0] for a, b in pairwise(found))


@pytest.mark.parametrize(
    ('kept', 'next_began', 'lost'),
    [
        (500, 500, 40.0),  # the checkpoint's
        (600, 600, 30.0),  # a survivor's state, on the way to the last report
        (750, 750, 15.0),  # at the speed of that report; the end was noted later
        (750, 500, 40.0),  # the survivor was lost, too
        (750, None, 40.0),  # the run was over
    ],
)
def test_what_survivors_keep_in_memory_is_not_lost(
    kept: int, next_began: int | None, lost: float
) -> None:
    first = FragmentRow(
        1, 'a', 1, 0.0,
        nodes=('x',), started_at=10.0, started_samples=0, seen_at=80.0, seen_samples=700,
        rate=10.0, ended_at=100.0, ending='preempted', samples=kept, reached=750,
    )  # fmt: skip
    history = RunHistory(
        runs=(RunRow(1, 'r', 0.0, 120.0, 'done', 120.0),),
        fragments=(first, FragmentRow(1, 'a', 2, 101.0, started_samples=next_began)),
        checkpoints=(CheckpointRow(1, 'a', 1, 60.0, 500),),
        offers=(Offer(1, 'x', 0.0, 120.0),),
        latest=1,
    )
    found = node_seconds_of(history)
    assert (found['lost'], found['trained']) == (lost, 90.0 - lost)


def story_of_a_kill(
    *,
    left: float,
    closed: float,
    ended: float,
    ending: str,
    started: float | None = 2.0,
    how: str = 'taken',
) -> RunHistory:
    return RunHistory(
        runs=(RunRow(1, 'r', 0.0, 100.0, 'done', 100.0),),
        blocks=(
            BlockRow(1, 'b', 0.0, closed_at=closed, how=how),
            BlockRow(1, 'c', 0.0, closed_at=60.0, how='taken'),
        ),
        nodes=(NodeRow(1, 'b/x', 'b', 'x', 1.0, left), NodeRow(1, 'c/y', 'c', 'y', 1.0, 60.0)),
        fragments=(
            FragmentRow(
                1, 'a', 1, 1.5,
                nodes=('b/x', 'c/y'), started_at=started, ended_at=ended, ending=ending,
            ),
        ),
        latest=1,
    )  # fmt: skip


def test_a_block_is_killed_if_it_was_taken_from_under_a_fragment() -> None:
    assert killed_blocks(story_of_a_kill(left=10, closed=12, ended=11, ending='preempted')) == 1
    assert killed_blocks(story_of_a_kill(left=10, closed=10, ended=10, ending='preempted')) == 1
    # The loss of a rank may be noted before the loss of its node; the fragment's other block is
    # taken much later.
    assert killed_blocks(story_of_a_kill(left=11, closed=12, ended=10, ending='preempted')) == 1


def test_a_block_is_not_killed_if_nothing_trained_on_it_or_it_was_not_taken() -> None:
    assert killed_blocks(story_of_a_kill(left=10, closed=12, ended=9, ending='stopped')) == 0
    assert killed_blocks(story_of_a_kill(left=10, closed=12, ended=10, ending='stopped')) == 0
    assert (
        killed_blocks(story_of_a_kill(left=10, closed=12, ended=11, ending='preempted', how='lost'))
        == 0
    )
    assert (
        killed_blocks(
            story_of_a_kill(left=10, closed=12, ended=11, ending='preempted', started=None)
        )
        == 0
    )
