"""Node-seconds: interval arithmetic against counting second by second."""

from hypothesis import strategies as st

from parsl_freetrain.core.model.state import Fragment, History, RunState
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.report.timeline import node_seconds_of, struck_nodes
from tests.support.properties import holds_for
from tests.support.told import Told

LAST = 30
seconds = st.integers(0, LAST)
maybe = st.none() | seconds


@st.composite
def stories(draw: st.DrawFn) -> History:
    """Anything a confused writer might say: any order, overlaps, unknown nodes, missing ends."""
    told = Told()
    some = st.lists(st.sampled_from(('x', 'y')), max_size=2, unique=True)
    nodes = st.sampled_from(['b0n0', 'b0n1', 'b1n0', 'b1n1', 'x'])
    places = st.lists(nodes, max_size=3, unique=True)
    endings = st.sampled_from(['finished', 'stopped', 'preempted', 'failed'])
    for number in range(draw(st.integers(1, 2))):
        begun = draw(seconds)
        told.begin_run(f'r{number}', at=begun)
        told.submitted('a', at=begun)
        for b in range(draw(st.integers(0, 3))):
            told.block_opened(f'b{b}', at=draw(seconds), names=draw(some))
            for n in range(draw(st.integers(0, 2))):
                name = draw(st.sampled_from(('x', 'y')))
                told.joined(f'b{b}n{n}', at=draw(seconds), block=f'b{b}', name=name)
                if (gone := draw(maybe)) is not None:
                    told.left(f'b{b}n{n}', at=gone)
            if (closed := draw(maybe)) is not None:
                told.block_closed(f'b{b}', at=closed, how='taken')
        for f in range(draw(st.integers(0, 4))):
            told.fragment_decided('a', f, at=draw(seconds), nodes=draw(places))
            if (started := draw(maybe)) is not None:
                told.fragment_started('a', f, at=started, samples=0)
            for _ in range(draw(st.integers(0, 2))):
                took, paused = draw(st.integers(0, 4)), draw(st.integers(0, 4))
                told.checkpoint('a', f, at=draw(seconds), samples=0, seconds=took, pause_s=paused)
            if (ended := draw(maybe)) is not None:
                told.fragment_ended('a', f, at=ended, ending=draw(endings), samples=0)
        told.offered(
            (draw(st.sampled_from(('x', 'y'))), draw(seconds), draw(maybe))
            for _ in range(draw(st.integers(0, 3)))
        )
        if (end := draw(st.none() | st.integers(begun, LAST))) is not None:
            told.end_run(at=end, how='done')
    return told.history


def counted(history: History, now: float | None) -> dict[str, int]:
    """The same classes, told second by second straight from their definitions."""
    totals = dict.fromkeys(('offered', 'trained', 'starting', 'checkpointing', 'lost', 'idle'), 0)
    for run in history.runs:
        alive = run.ended_at is None and run.id == history.latest
        until = max(run.last_at, now) if alive and now else run.last_at
        if run.ended_at is not None:
            until = run.ended_at
        offers = run.offers.values()
        for name in {o.node for o in offers}:
            for t in range(int(run.began.at), int(until)):
                if any(o.node == name and o.start <= t < o.end for o in offers):
                    totals['offered'] += 1
                    kinds = _kinds(run, alive, until, name, t)
                    order = ('lost', 'checkpointing', 'trained', 'starting')
                    totals[next((k for k in order if k in kinds), 'idle')] += 1
    return totals


def _kinds(run: RunState, alive: bool, until: float, name: str, t: int) -> set[str]:
    kinds: set[str] = set()
    for node in run.nodes.values():
        if node.name == name and run.blocks[node.block].opened.at <= t < node.joined_at:
            kinds.add('starting')
    for block in run.blocks.values():
        never = name in block.opened.request.names and not any(
            n.block == block.name and n.name == name for n in run.nodes.values()
        )
        end = until if block.closed_at is None else block.closed_at
        if never and block.opened.at <= t < end:
            kinds.add('starting')
    for f in run.fragments.values():
        for one in f.nodes:
            place = run.nodes.get(one)
            if (place.name if place else one) != name:
                continue
            if place:
                closed = run.blocks[place.block].closed_at
                gone = min([until] + [x for x in (place.left_at, closed) if x is not None])
                if not place.joined_at <= t < gone:
                    continue
            ended = max(f.launched.at, until if f.ended_at is None else f.ended_at)
            if f.launched.at <= t < ended:
                kinds.add(_kind(f, alive, ended, t))
    return kinds


def _kind(f: Fragment, alive: bool, ended: float, t: int) -> str:
    started = ended if f.started_at is None else min(max(f.launched.at, f.started_at), ended)
    if t < started:
        return 'starting'
    ending = f.ending if f.ended_at is not None else None if alive else 'preempted'
    if ending in ('preempted', 'failed') and not any(still(c)[1] > t for c in f.checkpoints):
        return 'lost'
    saves = any(still(c)[0] <= t < still(c)[1] for c in f.checkpoints)
    return 'checkpointing' if saves else 'trained'


def still(c: Checkpoint) -> tuple[float, float]:
    if c.pause_s < c.seconds:  # it was copied, and then written beside training
        return c.at - c.seconds - c.pause_s, c.at - c.seconds
    return c.at - c.pause_s, c.at


@holds_for(stories(), maybe, tries=100)
def test_every_offered_second_counts_once_in_right_class(history: History, now: int | None) -> None:
    found = node_seconds_of(history, now)
    assert found == counted(history, now)
    assert found['offered'] == sum(v for k, v in found.items() if k != 'offered')


def test_what_survivors_keep_in_memory_is_not_lost() -> None:
    for kept, next_began, lost in (
        (500, 500, 40.0),  # the checkpoint's
        (600, 600, 30.0),  # a survivor's state, on the way to the last report
        (750, 750, 15.0),  # at the speed of that report; the end was noted later
        (750, 500, 40.0),  # the survivor was lost, too
        (750, None, 40.0),  # the run was over
    ):
        told = Told()
        told.begin_run('r', at=0.0)
        told.submitted('a', at=0.0)
        told.offered([('x', 0.0, 120.0)])
        told.fragment_decided('a', 1, at=0.0, nodes=['x'])
        told.fragment_started('a', 1, at=10.0, samples=0)
        told.checkpoint('a', 1, at=60.0, samples=500)
        told.fragment_progress('a', 1, at=80.0, samples=700, rate=10.0)
        told.fragment_ended('a', 1, at=100.0, ending='preempted', samples=kept, reached=750)
        told.fragment_decided('a', 2, at=101.0, nodes=[])
        if next_began is not None:
            told.fragment_started('a', 2, at=101.0, samples=next_began)
        told.end_run(at=120.0, how='done')
        found = node_seconds_of(told.history)
        assert (found['lost'], found['trained']) == (lost, 90.0 - lost)


def killed(
    *,
    left: float,
    closed: float,
    ended: float,
    ending: str,
    started: float | None = 2.0,
    how: str = 'taken',
) -> int:
    """How many blocks were killed under a fragment on two of them."""
    told = Told()
    told.begin_run('r', at=0.0)
    told.submitted('a', at=0.0)
    for node, gone, over, why in (('b/x', left, closed, how), ('c/y', 60.0, 60.0, 'taken')):
        block, name = node.split('/')
        told.block_opened(block, at=0.0)
        told.joined(node, at=1.0, block=block, name=name)
        told.left(node, at=gone)
        told.block_closed(block, at=over, how=why)
    told.fragment_decided('a', 1, at=1.5, nodes=['b/x', 'c/y'])
    if started is not None:
        told.fragment_started('a', 1, at=started, samples=0)
    told.fragment_ended('a', 1, at=ended, ending=ending, samples=0)
    told.end_run(at=100.0, how='done')
    return len({node.block for node in struck_nodes(told.history.runs[0])})


def test_a_block_is_killed_if_it_was_taken_from_under_a_fragment() -> None:
    assert killed(left=10, closed=12, ended=11, ending='preempted') == 1
    assert killed(left=10, closed=10, ended=10, ending='preempted') == 1
    # The loss of a rank may be noted before the loss of its node; the fragment's other block is
    # taken much later.
    assert killed(left=11, closed=12, ended=10, ending='preempted') == 1


def test_a_block_is_not_killed_if_nothing_trained_on_it_or_it_was_not_taken() -> None:
    assert killed(left=10, closed=12, ended=9, ending='stopped') == 0
    assert killed(left=10, closed=12, ended=10, ending='stopped') == 0
    assert killed(left=10, closed=12, ended=11, ending='preempted', how='lost') == 0
    assert killed(left=10, closed=12, ended=11, ending='preempted', started=None) == 0
