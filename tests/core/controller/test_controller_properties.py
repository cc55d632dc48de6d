"""Whatever happens, in whatever order: a world obeys the controller and checks every action."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.controller_state import Reply
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.core.model.types import BlockRequest, Hole, ScalingCurve, Trainer
from tests.support.properties import examples

T = TypeVar('T')
CURVES = (
    None,
    ScalingCurve.from_points({1: 10.0, 8: 80.0}),
    ScalingCurve((1, 2, 4), (10.0, 17.0, 27.0)),
    ScalingCurve((1, 3, 4), (5.0, 6.0, 90.0)),
    ScalingCurve((1, 2, 5), (40.0, 50.0, 30.0)),
)
INDEX = st.integers(0, 11)
ENDS_S = st.none() | st.integers(0, 200)


@dataclass
class Fragment:
    number: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    stopped: bool = False
    abandoned: bool = False


@dataclass
class Training:
    trainer: Trainer
    samples: int
    last_fragment: int
    running: Fragment | None = None
    cancelled: bool = False


@dataclass
class Block:
    asked: int
    until_s: float | None = None
    nodes: dict[str, float | None] = field(default_factory=dict)
    joined: int = 0


def pick(items: Sequence[T], index: int) -> T:
    return items[index % len(items)]


def timeless(reply: Reply) -> Reply:
    """A reply without the seconds that the solver took."""
    if reply.decision is None:
        return reply
    answer = replace(reply.decision.answer, seconds=0.0)
    return replace(reply, decision=replace(reply.decision, answer=answer))


class World(RuleBasedStateMachine):
    """Blocks, nodes and fragments as they are outside, whatever the controller believes."""

    @initialize(
        spans=st.booleans(),
        at_a_time=st.sampled_from([None, 2]),
        retries=st.integers(0, 2),
        horizon_s=st.sampled_from([10.0, 120.0]),
        metric=st.sampled_from(['throughput', 'speedup']),
    )
    def begin(
        self, spans: bool, at_a_time: int | None, retries: int, horizon_s: float, metric: str
    ) -> None:
        self.settings = ControllerSettings(horizon_s=horizon_s, spans_blocks=spans, metric=metric)
        more = {'trainers_at_a_time': at_a_time, 'retries': retries, 'stalls': 3, 'max_blocks': 4}
        self.settings = structs.replace(self.settings, **more)
        self.controller = Controller(MilpAllocator(), self.settings)
        self.at = 0.0
        self.told: list[ev.Event] = []
        self.replies: list[Reply] = []
        self.trainings: dict[str, Training] = {}
        self.ended: dict[str, int] = {}  # last fragment by trainer that is over
        self.blocks: dict[str, Block] = {}
        self.closed: list[str] = []
        self.stale: list[ev.Event] = []
        self.shut = False

    # What the world sees of itself

    def present(self) -> dict[str, float | None]:
        blocks = self.blocks.values()
        return {name: until_s for block in blocks for name, until_s in block.nodes.items()}

    def block_of(self, node: str) -> str:
        return next(name for name, block in self.blocks.items() if node in block.nodes)

    def busy(self) -> list[str]:
        return [node for t in self.trainings.values() if t.running for node in t.running.nodes]

    def lasting(self, until_s: float | None) -> bool:
        return until_s is None or until_s - self.at >= self.settings.min_hole_s

    def running(self) -> list[Training]:
        return [t for t in self.trainings.values() if t.running]

    # Telling the controller, and doing what it says

    def tell(self, event: ev.Event) -> list[ev.OpenBlock]:
        reply = self.controller.handle(event)
        self.told.append(event)
        self.replies.append(reply)
        opening = []
        for action in reply.actions:
            match action:
                case ev.StartFragment():
                    self.start(action)
                case ev.StopFragment():
                    fragment = self.trainings[action.trainer].running
                    assert fragment is not None
                    assert fragment.number == action.fragment
                    assert not fragment.stopped
                    assert not fragment.abandoned
                    fragment.stopped = True
                case ev.AbandonFragment():
                    fragment = self.trainings[action.trainer].running
                    assert fragment is not None
                    assert fragment.number == action.fragment
                    assert not fragment.abandoned
                    assert not self.present().keys() >= set(fragment.nodes)
                    fragment.abandoned = True
                case ev.EndTrainer():
                    # A second end, or one of a stranger, is a KeyError.
                    over = self.trainings.pop(action.trainer)
                    assert over.running is None
                    assert action.state in {'finished', 'failed', 'cancelled'}
                    self.ended[action.trainer] = over.last_fragment
                case ev.CloseBlock():
                    assert not set(self.blocks[action.block].nodes) & set(self.busy())
                case ev.OpenBlock():
                    assert not self.shut
                    opening.append(action)
        return opening

    def start(self, action: ev.StartFragment) -> None:
        training, present = self.trainings[action.trainer], self.present()
        # KeyError: it has left.
        ends = [math.inf if (end := present[node]) is None else end for node in action.nodes]
        assert not self.shut
        assert training.running is None
        assert not training.cancelled
        assert action.fragment > training.last_fragment
        assert training.trainer.min_nodes <= len(action.nodes) <= training.trainer.max_nodes
        assert len(set(action.nodes)) == len(action.nodes)
        assert not set(action.nodes) & set(self.busy())
        assert all(self.lasting(present[node]) for node in action.nodes)
        assert (math.inf if action.deadline_s is None else action.deadline_s) == min(ends)
        assert action.samples == training.samples
        if not self.settings.spans_blocks:
            assert len({self.block_of(node) for node in action.nodes}) == 1
        training.last_fragment = action.fragment
        training.running = Fragment(action.fragment, action.nodes, action.deadline_s)

    def end(self, training: Training, ending: Ending, more: int) -> None:
        fragment = training.running
        assert fragment is not None
        if fragment.abandoned:
            ending = Ending.PREEMPTED
        training.running = None
        training.samples += more
        event = ev.FragmentEnded(
            self.at, training.trainer.name, fragment.number, training.samples, ending, 'an error'
        )
        self.stale.append(event)
        self.tell(event)

    # What may happen

    @rule(
        low=st.integers(1, 4),
        more=st.integers(0, 4),
        curve=st.sampled_from(CURVES),
        up_s=st.sampled_from([0.0, 2.0, 60.0]),
        again=st.booleans(),
        index=INDEX,
    )
    def submit(
        self, low: int, more: int, curve: ScalingCurve | None, up_s: float, again: bool, index: int
    ) -> None:
        if len(self.trainings) >= 4:
            return
        name, fragments = f't{len(self.trainings) + len(self.ended)}', 0
        if again and self.ended:
            name = pick(sorted(self.ended), index)
            fragments = self.ended.pop(name)
        trainer = Trainer(name, low, low + more, 1000, curve, up_s)
        self.trainings[name] = Training(trainer, fragments * 7, fragments)
        self.tell(ev.TrainerSubmitted(self.at, trainer, fragments * 7, fragments))

    @rule(index=INDEX, count=st.integers(1, 4), new=st.booleans(), in_s=ENDS_S)
    def join(self, index: int, count: int, new: bool, in_s: int | None) -> None:
        if len(self.present()) > 10:
            return
        if new or not self.blocks:
            name = f'b{len(self.blocks) + len(self.closed)}'
            self.blocks[name] = Block(count)
        else:
            name = pick(sorted(self.blocks), index)
        block = self.blocks[name]
        told = None if in_s is None else self.at + in_s
        until_s = min((end for end in (told, block.until_s) if end is not None), default=None)
        if block.until_s is None:
            block.until_s = until_s
        nodes = tuple(f'{name}n{block.joined + i}' for i in range(count))
        block.joined += count
        block.nodes.update(dict.fromkeys(nodes, until_s))
        self.tell(ev.NodesJoined(self.at, name, nodes, told))

    @precondition(lambda self: self.present())
    @rule(indices=st.sets(INDEX, min_size=1, max_size=4))
    def leave(self, indices: set[int]) -> None:
        names = sorted(self.present())
        gone = tuple(sorted({pick(names, index) for index in indices}))
        for node in gone:
            del self.blocks[self.block_of(node)].nodes[node]
        event = ev.NodesLeft(self.at, gone)
        self.stale.append(event)
        self.tell(event)

    @precondition(lambda self: self.blocks)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        name = pick(sorted(self.blocks), index)
        block = self.blocks.pop(name)
        self.closed.append(name)
        event = ev.BlockClosed(self.at, name)
        self.stale += [
            event,
            ev.NodesJoined(self.at, name, tuple(block.nodes) or ('late',)),
            ev.BlockOpened(self.at, name, BlockRequest(2)),
            ev.BlockEndKnown(self.at, name, self.at + 50),
        ]
        self.tell(event)

    @precondition(lambda self: self.blocks)
    @rule(index=INDEX, in_s=ENDS_S)
    def notice(self, index: int, in_s: int | None) -> None:
        name = pick(sorted(self.blocks), index)
        until_s = None if in_s is None else self.at + in_s
        block = self.blocks[name]
        if until_s != block.until_s:
            block.nodes = dict.fromkeys(block.nodes, until_s)
        block.until_s = until_s
        self.tell(ev.BlockEndKnown(self.at, name, until_s))

    @rule(after_s=st.sampled_from([0.5, 4.0, 31.0, 100.0]))
    def tick(self, after_s: float) -> None:
        self.at += after_s
        self.tell(ev.Tick(self.at))

    @precondition(lambda self: self.running())
    @rule(index=INDEX, ending=st.sampled_from(Ending), more=st.sampled_from([0, 10]))
    def fragment_ends(self, index: int, ending: Ending, more: int) -> None:
        self.end(pick(self.running(), index), ending, more)

    @precondition(lambda self: self.running())
    @rule(index=INDEX, rate=st.none() | st.sampled_from([0.0, 3.0, 10.0, 200.0]))
    def progress(self, index: int, rate: float | None) -> None:
        training = pick(self.running(), index)
        assert training.running is not None
        event = ev.FragmentProgressed(
            self.at, training.trainer.name, training.running.number, training.samples + 1, rate
        )
        self.tell(event)

    @precondition(lambda self: self.trainings)
    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        training = pick(list(self.trainings.values()), index)
        training.cancelled = True
        self.tell(ev.TrainerCancelled(self.at, training.trainer.name))

    @rule(sizes=st.lists(st.integers(0, 4), max_size=3), in_s=ENDS_S)
    def holes(self, sizes: list[int], in_s: int | None) -> None:
        until_s = None if in_s is None else self.at + in_s
        holes = tuple(Hole(size, until_s) for size in sizes)
        for action in self.tell(ev.HolesSeen(self.at, holes)):
            assert 1 <= action.request.nodes <= max(sizes)
            walltime_s = action.request.walltime_s
            assert walltime_s is None or walltime_s >= self.settings.min_hole_s
            assert len(self.blocks) < self.settings.max_blocks
            name = f'b{len(self.blocks) + len(self.closed)}'
            self.blocks[name] = Block(action.request.nodes)
            self.tell(ev.BlockOpened(self.at, name, action.request))

    @rule(outstanding=st.integers(0, 2))
    def ordinary(self, outstanding: int) -> None:
        self.tell(ev.OrdinaryWork(self.at, outstanding))

    @precondition(lambda self: self.stale)
    @rule(index=st.integers(0, 99))
    def late_or_twice(self, index: int) -> None:
        event = structs.replace(pick(self.stale, index), at=self.at)
        before = {name: t.running for name, t in self.trainings.items()}
        self.tell(event)
        assert all(t.running is before[name] for name, t in self.trainings.items() if before[name])

    @rule(index=INDEX)
    def about_strangers(self, index: int) -> None:
        self.tell(
            pick(
                [
                    ev.FragmentEnded(self.at, '?', 1, 5, Ending.FINISHED),
                    ev.FragmentProgressed(self.at, '?', 1, 5, 9.0),
                    ev.NodesLeft(self.at, ('?',)),
                    ev.BlockEndKnown(self.at, '?', self.at),
                    ev.TrainerCancelled(self.at, '?'),
                    ev.TotalKnown(self.at, '?', 5),
                    ev.BlockRequeued(self.at, '?'),
                ],
                index,
            )
        )

    @precondition(lambda self: not self.shut and len(self.told) > 20)
    @rule(index=INDEX)
    def shut_down(self, index: int) -> None:
        if index:  # seldom
            return
        self.shut = True
        self.tell(ev.ShutdownRequested(self.at))
        assert all(t.running.stopped or t.running.abandoned for t in self.running() if t.running)

    @rule()
    def settle(self) -> None:
        """What is to end ends, until nothing changes: no node is idle that a trainer could use."""
        for _ in range(20):
            asked = [
                t
                for t in self.running()
                if t.running
                and (
                    t.running.stopped
                    or t.running.abandoned
                    or not self.lasting(t.running.deadline_s)
                )
            ]
            if not asked:
                break
            for training in asked:
                self.end(training, Ending.STOPPED, 1)
            self.tell(ev.Tick(self.at))
        else:
            raise AssertionError('fragments are stopped and started for ever')
        if self.shut:
            assert not self.running()
            return
        free: dict[str, int] = {}
        for node, until_s in self.present().items():
            if self.lasting(until_s) and node not in self.busy():
                where = '' if self.settings.spans_blocks else self.block_of(node)
                free[where] = free.get(where, 0) + 1
        for training in list(self.trainings.values())[: self.settings.trainers_at_a_time]:
            assert training.running or training.trainer.min_nodes > max(free.values(), default=0)

    @invariant()
    def the_controller_knows_what_there_is(self) -> None:
        state = self.controller.state
        assert {name: t.until_s for name, t in state.pool.nodes.items()} == self.present()
        assert set(state.blocks) >= {name for name, block in self.blocks.items() if block.nodes}
        assert {name: t.running and t.running.nodes for name, t in state.trainers.items()} == {
            name: t.running and t.running.nodes for name, t in self.trainings.items()
        }

    @invariant()
    def no_node_is_in_two_fragments(self) -> None:
        assert len(set(self.busy())) == len(self.busy())

    @invariant()
    def what_lost_a_node_is_abandoned(self) -> None:
        present = self.present().keys()
        for training in self.running():
            assert training.running is not None
            assert training.running.abandoned or present >= set(training.running.nodes)

    def teardown(self) -> None:
        """The same events give the same replies."""
        if not hasattr(self, 'controller'):
            return
        again = Controller(MilpAllocator(), self.settings)
        assert [timeless(again.handle(event)) for event in self.told] == [
            timeless(reply) for reply in self.replies
        ]


TestWorld = pytest.mark.properties(World.TestCase)
TestWorld.settings = settings(max_examples=examples(45), stateful_step_count=40)
