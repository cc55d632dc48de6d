"""Several shapes for one node count, and counts whose memory does not suffice."""

from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.throughput_profile import REPORTS, ShapeChoice
from parsl_freetrain.core.controller.trainer_end import without
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

NAMES = {2: ('a', 'b', 'c'), 4: ('d', 'e')}


def report(choice: ShapeChoice, nodes: int, shape: int, *rates: float) -> None:
    for rate in rates:
        choice.observe(nodes, shape, rate)


def test_each_shape_is_tried_once_and_the_fastest_is_kept() -> None:
    choice = ShapeChoice(NAMES)
    used = []
    for rates in ((1.0, 5.0, 7.0), (9.0, 9.0, 9.0), (8.0, 8.0, 8.0)):
        used.append(choice.next(2))
        report(choice, 2, used[-1], *rates[:-1])
        assert not choice.change(2, used[-1])  # not enough of it yet
        report(choice, 2, used[-1], rates[-1])
    assert used == [0, 1, 2]
    assert choice.change(2, 0) == choice.change(2, 2) == 'go on in the fastest shape, b'
    assert (choice.next(2), choice.best(2), choice.change(2, 1)) == (1, 1, '')
    report(choice, 2, 1, *[0.1] * 9)  # a busy network, say
    assert choice.next(2) == 1
    assert (choice.next(4), choice.next(3)) == (0, 0)  # each count for itself


def test_what_is_left_without_a_count() -> None:
    for sizes, nodes, trained, left in (
        ((), 1, False, [2, 3, 4]),
        ((), 3, False, [4]),
        ((), 4, False, None),
        ((), 3, True, [1, 2, 4]),
        ((), 4, True, [1, 2, 3]),
        ((1, 2, 4), 2, False, [4]),
        ((1, 2, 4), 4, True, [1, 2]),
    ):
        found = without(Trainer('t', 1, 4, 100, sizes=sizes), nodes, trained)
        assert (None if found is None else list(found.counts())) == left
    curve = ScalingCurve((1, 2), (5.0, 0.0))
    for stated in Trainer('t', 1, 2, 100, curve), Trainer('t', 1, 2, class_curves=(('a', curve),)):
        assert without(stated, 1, trained=False) is None  # nothing is trained on two


class Run:
    """A controller with one trainer, which has all nodes."""

    def __init__(self, trainer: Trainer, nodes: int) -> None:
        self.controller = Controller(MilpAllocator())
        self.at, self.fragment = 0.0, 0
        joined = ev.NodesJoined(0.0, 'b', tuple(f'n{i}' for i in range(nodes)))
        self.actions = [
            *self.controller.handle(joined).actions,
            *self.controller.handle(ev.TrainerSubmitted(0.0, trainer)).actions,
        ]

    def started(self) -> tuple[int, int]:
        """Nodes and shape of the fragment that has just been started."""
        [start] = [action for action in self.actions if isinstance(action, ev.StartFragment)]
        self.fragment = start.fragment
        return len(start.nodes), start.shape

    def stopped(self) -> list[str]:
        return [action.why for action in self.actions if isinstance(action, ev.StopFragment)]

    def trains(self, rate: float) -> None:
        self.at += 1
        event = ev.FragmentProgressed(self.at, 't', self.fragment, int(self.at), rate)
        self.actions = list(self.controller.handle(event).actions)

    def ends(self, ending: ev.Ending = ev.Ending.STOPPED, *, out_of_memory: bool = False) -> None:
        self.at += 1
        samples = 0 if out_of_memory else int(self.at)
        error = 'MemoryError: no room' if out_of_memory else ''
        event = ev.FragmentEnded(self.at, 't', self.fragment, samples, ending, error, out_of_memory)
        self.actions = list(self.controller.handle(event).actions)


def test_a_trainer_changes_its_shape_and_its_curve_is_that_of_the_fastest() -> None:
    run = Run(Trainer('t', 2, 2, 1000, shapes=((2, ('a', 'b')),)), 2)
    assert run.started() == (2, 0)
    for rate in (4.0, 5.0, 6.0):
        assert not run.stopped()
        run.trains(rate)
    assert run.stopped() == ['try the shape b']
    run.trains(6.0)
    assert not run.stopped()  # it is told once
    run.ends()
    assert run.started() == (2, 1)
    profile = run.controller.state.trainers['t'].profiles.on('')
    for _ in range(REPORTS - 1):
        run.trains(20.0)
    assert profile.measured == {2: 5.5}
    run.trains(20.0)
    assert profile.measured == {2: 20.0} and not run.stopped()


def test_a_slower_shape_does_not_change_the_curve() -> None:
    run = Run(Trainer('t', 2, 2, 1000, shapes=((2, ('a', 'b')),)), 2)
    run.started()
    for _ in range(REPORTS):
        run.trains(6.0)
    run.ends()
    run.started()
    for _ in range(REPORTS):
        run.trains(2.0)
    assert run.stopped() == ['go on in the fastest shape, a']
    assert run.controller.state.trainers['t'].profiles.on('').measured == {2: 6.0}
    run.ends()
    assert run.started() == (2, 0)


def test_too_little_memory_teaches_the_smallest_count_and_is_no_error() -> None:
    """With two shapes on three nodes, the first of which does not fit; retries are not used up."""
    run = Run(Trainer('t', 1, 3, 1000, shapes=((3, ('a', 'b')),), sizes=(1, 3)), 1)
    assert run.started() == (1, 0)
    run.ends(ev.Ending.FAILED, out_of_memory=True)
    trainer = run.controller.state.trainers['t']
    assert (trainer.trainer.min_nodes, trainer.errors, run.actions) == (3, 0, [])
    run.actions = list(run.controller.handle(ev.NodesJoined(run.at, 'c', ('m1', 'm2'))).actions)
    assert run.started() == (3, 0)
    run.ends(ev.Ending.FAILED, out_of_memory=True)
    assert run.started() == (3, 1)
    run.ends(ev.Ending.FAILED, out_of_memory=True)
    [end] = [action for action in run.actions if isinstance(action, ev.EndTrainer)]
    assert end.state == 'failed'
    assert 'memory does not suffice on 3 nodes, and it has no other count: MemoryErr' in end.why
    assert 'allow more nodes (max_nodes)' in end.why
