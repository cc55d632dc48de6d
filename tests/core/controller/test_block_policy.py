"""Which holes get a block, and which blocks are given back."""

from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import CloseBlock, OpenBlock
from parsl_freetrain.core.model.types import BlockRequest, Hole, ScalingCurve, Trainer


def controller(*trainers: Trainer, settings: ControllerSettings | None = None) -> Controller:
    made = Controller(MilpAllocator(), settings)
    for trainer in trainers:
        made.handle(ev.TrainerSubmitted(0.0, trainer))
    return made


def opened(made: Controller, *holes: Hole, at: float = 0.0) -> list[BlockRequest]:
    """What is asked for these holes; nothing is opened by asking."""
    actions = made.handle(ev.HolesSeen(at, holes)).actions
    return [action.request for action in actions if isinstance(action, OpenBlock)]


def test_the_largest_holes_first_and_no_more_nodes_than_trainers_could_use() -> None:
    made = controller(Trainer('a', 1, 4), Trainer('b', 1, 3))
    named = Hole(4, 90.0, 'low', ('n1', 'n2', 'n3', 'n4'))
    assert opened(made, Hole(2), named, Hole(3, names=('m1', 'm2', 'm3')), at=10) == [
        BlockRequest(4, 80.0, 'low', ('n1', 'n2', 'n3', 'n4')),
        BlockRequest(3, None, '', ('m1', 'm2', 'm3')),
    ]
    assert opened(made, Hole(64, names=tuple(f'n{i}' for i in range(64)))) == [
        BlockRequest(7, names=tuple(f'n{i}' for i in range(7)))
    ]


def test_nodes_that_are_here_or_on_their_way_are_not_asked_for_again() -> None:
    made = controller(Trainer('a', 1, 6))
    made.handle(ev.BlockOpened(0.0, 'b', BlockRequest(4)))
    assert opened(made, Hole(9)) == [BlockRequest(2)]
    made.handle(ev.NodesJoined(1.0, 'b', ('n1',)))  # managers register one by one
    assert opened(made, Hole(9)) == [BlockRequest(2)]
    made.handle(ev.NodesJoined(1.0, 'b', ('n2', 'n3', 'n4')))
    made.handle(ev.NodesLeft(2.0, ('n1',)))
    assert opened(made, Hole(9)) == [BlockRequest(3)]
    made.handle(ev.BlockClosed(3.0, 'b'))
    assert opened(made, Hole(9)) == [BlockRequest(6)]


def test_without_trainers_nothing_is_opened_except_for_ordinary_work() -> None:
    made = controller(settings=ControllerSettings(workers_per_node=2))
    assert opened(made, Hole(4)) == []
    made.handle(ev.OrdinaryWork(0.0, 5))
    assert opened(made, Hole(4)) == [BlockRequest(3)]
    made.handle(ev.OrdinaryWork(0.0, 0))
    assert opened(made, Hole(4)) == []


def test_a_cancelled_trainer_and_one_whose_turn_has_not_come_want_nothing() -> None:
    made = controller(
        Trainer('a', 1, 2), Trainer('b', 1, 4), settings=ControllerSettings(trainers_at_a_time=1)
    )
    assert opened(made, Hole(9)) == [BlockRequest(2)]
    made.handle(ev.TrainerCancelled(0.0, 'a'))
    assert opened(made, Hole(9)) == [BlockRequest(4)]


def test_nothing_is_opened_that_no_trainer_could_start_on() -> None:
    together = controller(Trainer('a', 4, 8))
    assert opened(together, Hole(2), Hole(1)) == []
    blocks = [BlockRequest(2), BlockRequest(1), BlockRequest(1)]
    assert opened(together, Hole(2), Hole(1), Hole(1)) == blocks
    apart = controller(Trainer('a', 4, 8), settings=ControllerSettings(spans_blocks=False))
    assert opened(apart, Hole(3), Hole(3)) == []
    assert opened(apart, Hole(3), Hole(5)) == [BlockRequest(5)]
    together.handle(ev.OrdinaryWork(0.0, 1))
    assert opened(together, Hole(2)) == [BlockRequest(2)]


def test_nodes_on_which_the_curve_gains_nothing_are_not_wanted() -> None:
    peak = ScalingCurve((1, 8, 16), (1.0, 8.0, 6.0))
    assert opened(controller(Trainer('a', 1, 64, curve=peak)), Hole(64)) == [BlockRequest(8)]


def test_no_more_nodes_than_fit_the_sizes_are_asked_for() -> None:
    pair = Trainer('a', 2, 8, sizes=(2, 4, 8))
    assert opened(controller(pair), Hole(1)) == []
    assert opened(controller(pair), Hole(7)) == [BlockRequest(4)]
    three = opened(controller(pair), Hole(2), Hole(1), Hole(1))
    assert three == [BlockRequest(2), BlockRequest(1), BlockRequest(1)]
    assert opened(controller(pair, Trainer('b', 3, 3, sizes=(3,))), Hole(6)) == [BlockRequest(5)]
    assert opened(controller(pair, Trainer('c', 1, 1)), Hole(8)) == [BlockRequest(8)]
    apart = controller(pair, settings=ControllerSettings(spans_blocks=False))
    assert opened(apart, Hole(7), Hole(3)) == [BlockRequest(4), BlockRequest(2)]


def test_no_more_nodes_than_caps_allow_are_asked_for() -> None:
    annas = Trainer('a', 1, 4, user='anna', group='x'), Trainer('b', 1, 4, user='anna')
    trainers = (*annas, Trainer('c', 1, 4, group='x'))
    assert opened(
        controller(*trainers, settings=ControllerSettings(caps={'user anna': 3})), Hole(20)
    ) == [BlockRequest(7)]
    both = ControllerSettings(caps={'user anna': 6, 'group x': 1}, spans_blocks=False)
    made = controller(*trainers, settings=both)
    assert opened(made, Hole(20)) == [BlockRequest(5)]
    made.handle(ev.NodesJoined(0.0, 'b', ('n1', 'n2', 'n3', 'n4', 'n5')))
    assert opened(made, Hole(20)) == []


def test_where_blocks_cannot_talk_a_running_fragment_wants_no_second_block() -> None:
    made = controller(Trainer('a', 1, 8), settings=ControllerSettings(spans_blocks=False))
    made.handle(ev.NodesJoined(0.0, 'b', ('n1', 'n2')))
    assert opened(made, Hole(6)) == []
    made.handle(ev.TrainerSubmitted(0.0, Trainer('c', 1, 4)))
    assert opened(made, Hole(6)) == [BlockRequest(4)]


def test_a_block_on_which_nothing_runs_is_given_back_after_a_while() -> None:
    made = controller(Trainer('a', 1, 1), settings=ControllerSettings(idle_block_s=30.0))
    made.handle(ev.NodesJoined(0.0, 'b', ('n1', 'n2')))
    made.handle(ev.NodesJoined(0.0, 'spare', ('m1',)))
    made.handle(ev.BlockOpened(0.0, 'queued', BlockRequest(1)))
    [idle] = {'b', 'spare'} - {made.state.pool.nodes[n].block for n in made.state.pool.holder}
    assert made.handle(ev.Tick(29.0)).actions == ()
    closes = (CloseBlock(idle, 'nothing has run on it for 30 s'),)
    assert made.handle(ev.Tick(30.0)).actions == closes
    assert made.handle(ev.Tick(31.0)).actions == ()
    again = made.handle(ev.Tick(60.0)).actions  # it is still there
    assert again == (CloseBlock(idle, 'nothing has run on it for 30 s'),)


def test_a_block_in_use_is_kept_and_its_patience_starts_anew() -> None:
    made = controller(settings=ControllerSettings(idle_block_s=30.0))
    made.handle(ev.NodesJoined(0.0, 'b', ('n1',)))
    made.handle(ev.TrainerSubmitted(20.0, Trainer('a', 1, 1)))
    assert made.handle(ev.Tick(500.0)).actions == ()
    made.handle(ev.FragmentEnded(500.0, 'a', 1, 9, ev.Ending.FINISHED))
    made.handle(ev.OrdinaryWork(510.0, 1))
    assert made.handle(ev.Tick(900.0)).actions == ()
    made.handle(ev.OrdinaryWork(900.0, 0))
    assert made.handle(ev.Tick(929.0)).actions == ()
    closes = (CloseBlock('b', 'nothing has run on it for 30 s'),)
    assert made.handle(ev.Tick(930.0)).actions == closes


def test_a_block_that_lost_all_of_its_nodes_is_given_back() -> None:
    made = controller(Trainer('a', 1, 1), settings=ControllerSettings(idle_block_s=30.0))
    made.handle(ev.NodesJoined(0.0, 'b', ('n1',)))
    made.handle(ev.NodesLeft(1.0, ('n1',)))
    made.handle(ev.FragmentEnded(1.0, 'a', 1, 0, ev.Ending.PREEMPTED))
    closes = (CloseBlock('b', 'nothing has run on it for 30 s'),)
    assert made.handle(ev.Tick(31.0)).actions == closes


def test_nodes_that_are_kept_free_are_there_and_stay() -> None:
    spared = ControllerSettings(idle_block_s=30.0, keep_free=1, max_nodes=2)
    assert opened(controller(Trainer('a', 1, 8), settings=spared), Hole(9)) == [BlockRequest(3)]
    made = controller(Trainer('a', 1, 1), settings=spared)
    for block in 'bcde':
        made.handle(ev.NodesJoined(0.0, block, (f'n-{block}',)))
    assert len(made.state.pool.holder) == 1
    assert len(made.handle(ev.Tick(40.0)).actions) == 2, 'of the three that are idle one stays'
    made.handle(ev.FragmentEnded(50.0, 'a', 1, 1, ev.Ending.FINISHED))
    made.handle(ev.Tick(100.0))
    assert len(made.handle(ev.Tick(200.0)).actions) == 4


def test_a_block_that_is_queued_again_is_not_idle_and_its_nodes_are_on_their_way() -> None:
    made = controller(Trainer('a', 2, 4), settings=ControllerSettings(idle_block_s=10.0))
    made.handle(ev.BlockOpened(0.0, 'b', BlockRequest(4)))
    made.handle(ev.NodesJoined(1.0, 'b', ('n1', 'n2', 'n3', 'n4')))
    made.handle(ev.NodesLeft(2.0, ('n1', 'n2', 'n3', 'n4')))
    made.handle(ev.BlockRequeued(2.0, 'b'))
    assert opened(made, Hole(9)) == []
    for at in (3.0, 14.0, 100.0):
        actions = made.handle(ev.Tick(at)).actions
        assert not [action for action in actions if isinstance(action, ev.CloseBlock)]
    # The nodes come back one by one; the first is too few for the trainer.
    made.handle(ev.NodesJoined(101.0, 'b', ('n1',)))
    actions = made.handle(ev.Tick(102.0)).actions
    assert not [action for action in actions if isinstance(action, ev.CloseBlock)]
