"""Measurements of trainers: speed by node count and class, rescale costs, shapes tried."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.state import Fragment, History, RunState, Training
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

Place = tuple[int, str]  # node count and class; the class is empty where nodes are not told apart


def place_of(run: RunState, fragment: Fragment) -> Place:
    """Where a fragment ran; nodes of several classes at once are ``a+b``."""
    blocks = {run.nodes[node].block for node in fragment.nodes if node in run.nodes}
    classes = {run.blocks[name].opened.request.node_class for name in blocks if name in run.blocks}
    return len(fragment.nodes), '+'.join(sorted(classes - {''}))


class Speed:
    """A trainer's speed, learned as the controller does. A stated curve gives only the shape."""

    def __init__(self, trainer: Trainer) -> None:
        self.stated = trainer.curve
        self._most = trainer.max_nodes
        self._profiles: dict[str, Profile] = defaultdict(lambda: Profile(None))
        # A cache, cleared by each new report.
        self._curves: dict[Place, ScalingCurve | None] = {}

    @property
    def measured(self) -> dict[str, dict[int, float]]:
        return {name: profile.measured for name, profile in sorted(self._profiles.items())}

    def observe(self, place: Place, rate: float | None) -> None:
        nodes, node_class = place
        if rate is not None and nodes:
            self._profiles[node_class].observe(nodes, rate)
            self._curves.clear()

    def curve(self, nodes: int = 1, node_class: str = '') -> ScalingCurve | None:
        """Samples per second, for ``nodes`` and all counts known; None: not measured yet."""
        place = max(self._most, nodes), node_class
        if place not in self._curves:
            self._curves[place] = self._curve(*place)
        return self._curves[place]

    def _curve(self, most: int, node_class: str) -> ScalingCurve | None:
        measured = self.measured.get(node_class)
        if not measured:
            return None
        if self.stated is None:
            return self._profiles[node_class].curve(max(most, *measured), 1.0, optimism=0.0)
        base = min(measured)
        shape = self.stated.rate_at(base)
        if shape <= 0:
            return None
        factor = measured[base] / shape
        return ScalingCurve(self.stated.nodes, tuple(rate * factor for rate in self.stated.rate))


def speeds(history: History) -> dict[str, Speed]:
    """By trainer; all runs of a resumed workflow count."""
    trainers = {one.name: one.trainer for one in history.trainings}
    found = {name: Speed(trainer) for name, trainer in trainers.items()}
    for run in history.runs:
        for fragment in run.fragments.values():
            place = place_of(run, fragment)
            for report in fragment.progress if fragment.trainer in found else ():
                found[fragment.trainer].observe(place, report.rate)
    return found


MOST_POINTS = 64  # maximum number of points of a curve


@dataclass(frozen=True)
class MeasuredScaling:
    trainer: str
    node_class: str  #: empty where nodes are not told apart
    stated: bool  #: whether the user stated the curve's shape; otherwise it was measured
    #: (nodes, samples per second), from measurements; empty without any.
    curve: tuple[tuple[int, float], ...]
    #: (nodes, typical samples per second, fragments), for each node count that was measured.
    measured: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class RescaleCost:
    trainer: str
    change: str  #: 'up', 'down', or 'start': from no nodes at all
    #: The cost that decisions assume before the first measurement, or always if the user stated it.
    assumed_s: float
    #: By change: from the last step before to the first after it, as reported; else the last
    #: checkpoint's time plus that from the decision to the first step.
    measured_s: tuple[float, ...]


@dataclass(frozen=True)
class ShapeTried:
    trainer: str
    nodes: int
    shape: str
    #: Samples per second, the median of the last reports of its fragments; None: none has reported.
    rate: float | None
    newest: bool  #: whether the trainer's last fragment on this node count had this shape
    memory: int = 0  #: the most memory that a rank of its fragments needed, in bytes; 0: unknown


def scalings(history: History) -> dict[str, list[MeasuredScaling]]:
    """By trainer, for each class on which it was measured; all runs of a resumed workflow count."""
    every = ((run, one) for run in history.runs for one in run.fragments.values())
    seen = ((run, one) for run, one in every if any(report.rate for report in one.progress))
    fragments = Counter((one.trainer, *place_of(run, one)) for run, one in seen)
    trainers = {one.name: one.trainer for one in history.trainings}
    return {
        name: [
            MeasuredScaling(
                name,
                node_class,
                speed.stated is not None,
                _points(speed, trainers[name], node_class),
                tuple(
                    (n, rate, fragments[name, n, node_class]) for n, rate in sorted(rates.items())
                ),
            )
            for node_class, rates in (speed.measured or {'': {}}).items()
        ]
        for name, speed in speeds(history).items()
    }


def _points(speed: Speed, trainer: Trainer, node_class: str) -> tuple[tuple[int, float], ...]:
    curve = speed.curve(node_class=node_class)
    if curve is None:
        return ()
    fewest, most = trainer.min_nodes, trainer.max_nodes
    step = -(-(most - fewest + 1) // MOST_POINTS)
    return tuple((n, curve.rate_at(n)) for n in sorted({*range(fewest, most + 1, step), most}))


def rescale_costs(history: History) -> list[RescaleCost]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    trainers: dict[str, Trainer] = {}
    for one in history.trainings:
        trainers[one.name] = one.trainer
        for change, seconds in _changes(one):
            found[one.name, change].append(seconds)
    assumed = {
        name: {'up': t.rescale_up_s, 'down': t.rescale_down_s, 'start': 0.0}
        for name, t in trainers.items()
    }
    return [
        RescaleCost(name, change, seconds, tuple(found[name, change]))
        for name in trainers
        for change, seconds in assumed[name].items()
        if (name, change) in found
    ]


def _changes(training: Training) -> list[tuple[str, float]]:
    reported = {event.fragment: event.seconds for event in training.rescaled}
    fragments, found = training.fragments, []
    if fragments and fragments[0].started_at is not None:
        found.append(('start', fragments[0].started_at - fragments[0].launched.at))
    for before, after in pairwise(fragments):
        if after.started_at is None:
            continue
        seconds = after.started_at - after.launched.at
        if before.ending != 'stopped':
            found.append(('start', seconds))  # nodes were lost, so there was no handover
        elif len(after.nodes) != len(before.nodes):
            change = 'up' if len(after.nodes) > len(before.nodes) else 'down'
            saved_s = before.checkpoints[-1].seconds if before.checkpoints else 0.0
            found.append((change, reported.get(after.number, seconds + saved_s)))
    return found


def shapes_tried(fragments: Iterable[Fragment]) -> list[ShapeTried]:
    found: dict[tuple[str, int], dict[str, list[Fragment]]] = {}
    newest: dict[tuple[str, int], str] = {}
    for fragment in fragments:
        if fragment.shape:
            of = fragment.trainer, len(fragment.nodes)
            found.setdefault(of, {}).setdefault(fragment.shape, []).append(fragment)
            newest[of] = fragment.shape
    tried = []
    for of, shapes in sorted(found.items()):
        for shape, mine in shapes.items():
            rates = [f.seen.rate for f in mine if f.seen and f.seen.rate is not None]
            memory = max(f.ended.memory if f.ended else 0 for f in mine)
            rate = median(rates) if rates else None
            tried.append(ShapeTried(*of, shape, rate, newest[of] == shape, memory))
    return tried
