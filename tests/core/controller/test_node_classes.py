"""Nodes of several classes: who gets which, what is learned of each, which holes get a block."""

from functools import partial

import pytest

from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.throughput_profile import ClassProfiles, speed_ratio
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import Ending, OpenBlock, StartFragment, StopFragment
from parsl_freetrain.core.model.types import BlockRequest, Hole, ScalingCurve, Trainer
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.settings import Policy, check_classes
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.slurm import SlurmSite
from parsl_freetrain.training.spec.training import Scaling

FAST, SLOW = ('f0', 'f1', 'f2'), ('s0', 's1', 's2')


def linear(rate: float) -> ScalingCurve:
    return ScalingCurve.from_points({1: rate, 8: 8 * rate})


class Machine:
    """A controller, and the nodes of each trainer as its actions have them."""

    def __init__(self, *trainers: Trainer, metric: str = 'throughput') -> None:
        self.controller = Controller(MilpAllocator(), ControllerSettings(metric=metric))
        self.nodes: dict[str, tuple[str, ...]] = {}
        self.moves = 0
        self.tell(*(ev.TrainerSubmitted(0.0, trainer) for trainer in trainers))

    def tell(self, *events: ev.Event) -> tuple[ev.Action, ...]:
        """Handle the events of one instant, and stop what is to be stopped."""
        actions = self.controller.handle_all(events).actions
        stopped = []
        for action in actions:
            if isinstance(action, StartFragment):
                self.nodes[action.trainer] = action.nodes
            if isinstance(action, StopFragment):
                self.moves += 1
                ended = events[-1].at, action.trainer, action.fragment
                stopped.append(ev.FragmentEnded(*ended, 100, Ending.STOPPED))
        return actions + (self.tell(*stopped) if stopped else ())

    def join(self, at: float, names: tuple[str, ...], node_class: str) -> None:
        request = BlockRequest(len(names), node_class=node_class)
        self.tell(
            ev.BlockOpened(at, f'block {node_class}', request),
            ev.NodesJoined(at, f'block {node_class}', names, None, node_class),
        )

    def measure(self, at: float, per_node: dict[str, float]) -> None:
        """All trainers report their speed, a number for each class of nodes ('f' or 's')."""
        for name, trainer in self.controller.state.trainers.items():
            running = trainer.running
            assert running is not None
            rate = sum(per_node[node[0]] for node in running.nodes)
            self.tell(ev.FragmentProgressed(at, name, running.number, 200, rate))


def test_a_class_is_tried_once_and_kept_if_it_is_faster() -> None:
    for fast, slow, moves in ((20.0, 10.0, 1), (5.0, 10.0, 2)):
        machine = Machine(Trainer('net', 1, 3))
        machine.join(1.0, SLOW, 'slow')
        machine.join(2.0, FAST, 'fast')
        for second in range(3, 60):
            machine.measure(float(second), {'f': fast, 's': slow})
        assert machine.nodes['net'] == (FAST if fast > slow else SLOW)
        assert machine.moves == moves


def test_what_one_trainer_shows_of_a_class_holds_for_others() -> None:
    known, new = ClassProfiles(Trainer('a', 1, 4)), ClassProfiles(Trainer('b', 1, 4))
    for node_class, rate in (('fast', 30.0), ('slow', 10.0)):
        known.on(node_class).observe(1, rate)
    new.on('slow').observe(1, 7.0)
    both = [known, new]
    assert speed_ratio(both, 'fast', 'slow') == pytest.approx(3.0, rel=0.05)
    curves = dict(new.curves(('fast', 'slow'), 4, 1.0, partial(speed_ratio, both)))
    for nodes in (1, 2, 4):
        ratio = curves['fast'].rate_at(nodes) / curves['slow'].rate_at(nodes)
        assert ratio == pytest.approx(3.0, rel=0.05)


def test_holes_of_fast_nodes_are_used_although_slow_ones_suffice() -> None:
    net = Trainer('net', 1, 3, class_curves=(('fast', linear(20)), ('slow', linear(10))))
    machine = Machine(net)
    holes = tuple(Hole(3, node_class=name) for name in ('slow', 'fast', 'unused'))

    def opened(at: float) -> list[str]:
        actions = machine.tell(ev.HolesSeen(at, holes))
        return [a.request.node_class for a in actions if isinstance(a, OpenBlock)]

    assert opened(0.5) == ['fast']
    machine.join(1.0, SLOW, 'slow')
    assert opened(2.0) == ['fast']
    machine.join(3.0, FAST, 'fast')
    assert opened(4.0) == []


@pytest.mark.parametrize(('left', 'moves'), [(20_000, 1), (100, 0)])
def test_a_trainer_that_is_nearly_done_does_not_move_to_faster_nodes(left: int, moves: int) -> None:
    machine = Machine(metric='fair_goodput')
    rates = (('fast', linear(20)), ('slow', linear(10)))
    net = Trainer('net', 1, 3, 100 + left, rescale_up_s=30.0, class_curves=rates)
    machine.tell(ev.TrainerSubmitted(0.0, net, samples=100))
    machine.join(1.0, SLOW, 'slow')
    machine.join(1000.0, FAST, 'fast')
    assert machine.moves == moves


def test_classes_that_the_site_does_not_have_are_refused() -> None:
    rate = Scaling(class_rates={'h100': {1: 5.0}})
    net = Trainer('net', 1, 3, class_curves=rate.class_curves())
    assert rate.curve() is None
    with pytest.raises(BadInput, match='give one of them'):
        Scaling(rate={1: 5.0}, class_rates={'fast': {1: 5.0}})
    with pytest.raises(BadInput, match='it must name a class, and a node count'):
        Scaling(class_rates={})
    with pytest.raises(BadInput, match='it must name a class, and a node count'):
        Scaling(class_rates={'fast': {}})
    site = LocalSite(2, node_classes={'slot00': 'fast', 'slot01': 'slow'})
    with pytest.raises(BadInput, match=r"'net'.*class 'h100'; the site has fast, slow"):
        check_classes(net, site)
    shapes = Trainer('net', 2, 2, shapes=((2, ('data 2', 'shard 2')),))
    with pytest.raises(BadInput, match='give one shape for each count'):
        check_classes(shapes, site)
    with pytest.raises(BadInput, match='the site does not tell nodes apart'):
        check_classes(net, LocalSite(2))
    with pytest.raises(BadInput, match=r'node_classes is .*slot07.*; .* of each of slot00, slot01'):
        LocalSite(2, node_classes={'slot07': 'fast'})
    with pytest.raises(BadInput, match='node_classes is .*; it must be a dict'):
        LocalSite(2, node_classes=['fast', 'slow'])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="of slot00: the node class is 'a b'; it must be made of"):
        LocalSite(2, node_classes={'slot00': 'a b', 'slot01': 'slow'})
    ends = LocalSite(schedule=Schedule([IdleInterval(0, 9, 'a')]))
    for unfit, differs in (
        (site, 'the classes of its nodes are fast, slow'),
        (ends, 'its nodes leave at several times'),
        (SlurmSite(partition='p', spans_blocks=False), 'its blocks cannot be mixed'),
    ):
        provider = BackfillProvider(unfit)
        with pytest.raises(BadInput, match=f"solver 'dp' cannot decide .*: {differs}. Take 'auto'"):
            FreeTrainExecutor(provider, policy=Policy(solver='dp'))
        FreeTrainExecutor(provider, policy=Policy(solver='equal-share'))
    FreeTrainExecutor(BackfillProvider(LocalSite(2)), policy=Policy(solver='dp'))
    site.start()
    classes = ('slot00', 'fast'), ('slot01', 'slow')
    assert site.holes() == tuple(Hole(1, names=(name,), node_class=kind) for name, kind in classes)
