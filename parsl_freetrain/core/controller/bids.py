"""The bids of the trainers, updated only where something has changed."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from parsl_freetrain.core.allocation import objectives
from parsl_freetrain.core.allocation.objectives import Candidate, Metric, Running
from parsl_freetrain.core.allocation.problem import Bid, Capacity
from parsl_freetrain.core.controller.controller_state import ControllerState, TrainerState
from parsl_freetrain.core.controller.node_pool import Group, GroupKey, key_of
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.throughput_profile import CAUTION, speed_ratio
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

EVERYWHERE = ''
LASTING = 'lasting'


@dataclass(frozen=True)
class Places:
    nodes: int
    blocks: tuple[Capacity, ...]  # as in Problem; empty if only counts matter
    groups: dict[str, list[Group]]  # of the pool, by place
    layout: tuple[object, ...]  # equal where every node has the same place index
    _index: dict[GroupKey, int]

    def held(self, keys: Sequence[GroupKey]) -> tuple[int, ...]:
        counts = [0] * len(self.blocks)
        for key in keys:
            counts[self._index[key]] += 1
        return tuple(counts)


def places_of(
    state: ControllerState, at: float, horizon_s: float, min_hole_s: float, spans_blocks: bool
) -> Places:
    """The present places, without nodes that leave within ``min_hole_s`` or that a cancelled
    trainer holds: each class of each block, until its first node leaves. If fragments may span
    blocks, nodes of a class that leave together are one, and those that stay for the horizon
    another.
    """
    groups = [group for group in state.pool.groups.values() if group.until_s - at >= min_hole_s]
    leaving = state.leaving()
    if spans_blocks:
        ends = sorted({group.until_s for group in groups if group.until_s - at < horizon_s})
        classes = sorted({group.node_class for group in groups})
        if not ends and not any(classes):
            held = sum(leaving.get(group.key, 0) for group in groups if leaving)
            nodes = sum(group.total for group in groups) - held
            return Places(nodes, (), {EVERYWHERE: groups}, (), {})
        names = {end: f'until {end:.3f}' for end in ends}
        named = [*names.items(), (math.inf, LASTING)]
        at_end = [(node_class, end, name) for node_class in classes for end, name in named]
        blocks = [Capacity(_name(name, k), 0, end - at, k) for k, end, name in at_end]
        of = {g.key: _name(names.get(g.until_s, LASTING), g.node_class) for g in groups}
        layout: tuple[object, ...] = (*ends, *classes)
    else:
        ends_of: dict[tuple[str, str], float] = {}
        for group in groups:
            key = group.block, group.node_class
            ends_of[key] = min(group.until_s, ends_of.get(key, math.inf))
        left = [(key, end - at) for key, end in sorted(ends_of.items())]
        blocks = [Capacity(_name(*k), 0, s if s < horizon_s else math.inf, k[1]) for k, s in left]
        of = {g.key: _name(g.block, g.node_class) for g in groups}
        layout = tuple(sorted(ends_of))
    counts = dict.fromkeys((block.name for block in blocks), 0)
    members: dict[str, list[Group]] = {block.name: [] for block in blocks}
    for group in groups:
        counts[of[group.key]] += group.total - leaving.get(group.key, 0)
        members[of[group.key]].append(group)
    place = {block.name: i for i, block in enumerate(blocks)}
    counted = tuple(replace(block, nodes=counts[block.name]) for block in blocks)
    of_group = {key: place[name] for key, name in of.items()}
    return Places(sum(counts.values()), counted, members, layout, of_group)


def _name(name: str, node_class: str) -> str:
    return f'{name} on {node_class}' if node_class else name


ClassCurves = tuple[tuple[str, ScalingCurve], ...]

LOOKS = 4  # how often per horizon time-dependent bids are renewed: most decisions stand


class Bids:
    """Bids of all trainers whose turn it is. ``timed``: the objective changes with time."""

    def __init__(
        self, settings: ControllerSettings, metric: Metric, *, timed: bool = False
    ) -> None:
        self._settings, self._metric = settings, metric
        self._renew_s = settings.horizon_s / LOOKS if timed else math.inf
        self._renewed_at = -math.inf
        self._bids: dict[str, Bid] = {}
        self._current: dict[str, int] = {}
        self._all: tuple[Bid, ...] | None = ()
        # By trainer: its profiles and the node classes that there were, and the worth.
        self._curves: dict[str, tuple[object, tuple[ScalingCurve, ClassCurves]]] = {}
        self._layout: object = ()
        self._deadlines: list[tuple[float, str]] = []  # heap of fragments' own deadlines
        # Heap: when trainers were rescaled whose bids stay fixed for min_rescale_s.
        self._fixed_since: list[tuple[float, str]] = []
        self._noted: dict[str, int] = {}  # the fragments that are in these two heaps
        self._unmeasured: dict[str, None] = {}  # trainers whose speed is not known
        self._typical = 1.0
        self._shortest_s = settings.min_hole_s

    @property
    def current(self) -> dict[str, int]:
        return dict(self._current)

    def refresh(self, state: ControllerState, at: float, places: Places) -> tuple[Bid, ...]:
        """Bring all bids up to date; a fragment that ends has paid, and bids without nodes."""
        self._let_time_pass(state, at)
        if places.layout != self._layout:  # the places of held nodes have new indices
            self._layout = places.layout
            state.changed.update((name, None) for name, count in self._current.items() if count)
        unknown = bool(self._unmeasured)
        for name in list(state.changed):
            self._follow(name, state, at)
        if unknown != bool(self._unmeasured):  # others hope for less as long as there are any
            state.changed.update(dict.fromkeys(state.active))
        if self._unmeasured:
            rates = (t.profiles.best().one_node_rate() for t in state.active.values())
            known = [rate for rate in rates if rate is not None]
            typical = sum(known) / len(known) if known else 1.0
            if typical != self._typical:
                self._typical = typical
                state.changed.update(self._unmeasured)
        if state.changed:
            self._all = None
            for name in state.changed:
                self._remake(name, state, at, places)
            state.changed.clear()
        if self._all is None:
            self._all = tuple(self._bids.values())
        return self._all

    def _let_time_pass(self, state: ControllerState, at: float) -> None:
        if at - self._renewed_at >= self._renew_s:
            self._renewed_at = at
            state.changed.update(dict.fromkeys(state.active))
        if state.shortest_s != self._shortest_s:  # another set of fragments is ending soon
            self._shortest_s = state.shortest_s
            for forgotten in (self._deadlines, self._fixed_since, self._noted):
                forgotten.clear()
            state.changed.update(dict.fromkeys(state.active))
        while self._deadlines and self._deadlines[0][0] - at < self._shortest_s:
            state.changed[heappop(self._deadlines)[1]] = None
        while self._fixed_since and not self._too_soon(self._fixed_since[0][0], at):
            state.changed[heappop(self._fixed_since)[1]] = None

    def _follow(self, name: str, state: ControllerState, at: float) -> None:
        """Note when time changes this bid, and whether it depends on others' speed."""
        trainer = state.active.get(name)
        if trainer is None:
            self._unmeasured.pop(name, None)
            self._noted.pop(name, None)
            return
        if not trainer.profiles.stated and not trainer.profiles.measured:
            self._unmeasured[name] = None
        else:
            self._unmeasured.pop(name, None)
        running = trainer.running
        noted = running and self._noted.get(name) == running.number
        if running is None or running.ending(at, self._shortest_s) or noted:
            return
        self._noted[name] = running.number
        if running.deadline_s is not None:
            heappush(self._deadlines, (running.deadline_s, name))
        if self._too_soon(trainer.rescaled_at, at):
            heappush(self._fixed_since, (trainer.rescaled_at, name))

    def _remake(self, name: str, state: ControllerState, at: float, places: Places) -> None:
        trainer = state.active.get(name)
        if trainer is None:
            self._bids.pop(name, None)
            self._current.pop(name, None)
            self._curves.pop(name, None)
            return
        running, spec = trainer.running, trainer.trainer
        nodes = () if running is None or running.ending(at, self._shortest_s) else running.nodes
        known = state.pool.nodes
        keys = [key_of(known[node]) for node in nodes] if places.blocks else []
        held = places.held(keys) if keys else ()
        classes = Counter(state.pool.nodes[node].node_class for node in nodes)
        self._current[name] = len(nodes)
        costs = trainer.measured.costs(spec)
        current_class = next(iter(classes)) if len(classes) == 1 else ''
        lost_s = max(trainer.fragments - 1, 0) * costs[0]
        age_s = at - trainer.submitted_at
        here = Running(len(nodes), current_class, costs[0], age_s, lost_s) if nodes else None
        worth, worths = self._worth(state, trainer, at, here)
        self._bids[name] = Bid(
            name,
            spec.min_nodes,
            spec.max_nodes,
            len(nodes),
            *((0.0, 0.0) if self._metric in objectives.CHARGES_RESTARTS else costs),
            worth,
            held,
            spec.sizes,
            fixed=bool(nodes)
            and (self._too_soon(trainer.rescaled_at, at) or trainer.piece_s() < max(costs)),
            shortest_s=trainer.measured.shortest_s(self._settings.min_hole_s),
            class_curves=worths,
            current_class=current_class,
            mixed_parts=spec.mixed_parts,
            current_mix=tuple(sorted(classes.items())) if spec.mixed_parts else (),
        )

    def _too_soon(self, rescaled_at: float, at: float) -> bool:
        return at - rescaled_at < self._settings.min_rescale_s

    def _worth(
        self, state: ControllerState, trainer: TrainerState, at: float, here: Running | None
    ) -> tuple[ScalingCurve, ClassCurves]:
        """By node count and class, cached for stated curves; without a value, the last one."""
        spec, profiles = trainer.trainer, trainer.profiles
        known = self._curves.get(spec.name)
        same = profiles.stated and self._renew_s == math.inf
        if known is not None and same and known[0] == (profiles, state.classes):
            return known[1]
        optimism = CAUTION if self._unmeasured else None
        curve = profiles.best().curve(spec.max_nodes, self._typical, optimism)

        def ratio(node_class: str, other: str) -> float:
            return speed_ratio((t.profiles for t in state.active.values()), node_class, other)

        on_class = profiles.curves(state.classes, spec.max_nodes, self._typical, ratio, optimism)
        waited_s = 0.0 if trainer.running is not None else at - trainer.waiting_since
        try:
            candidate = candidate_of(spec, curve, at, trainer.reached, waited_s)
            candidate = replace(candidate, running=here)
            classes = objectives.by_class(self._metric, candidate, on_class)
            worth = self._metric(candidate), classes
        except BadInput:
            if known is None:
                raise
            worth = known[1]
        self._curves[spec.name] = ((profiles, state.classes), worth)
        return worth


def candidate_of(
    trainer: Trainer, curve: ScalingCurve, at: float, samples: int, waited_s: float = 0.0
) -> Candidate:
    """A trainer at ``at`` as the objective sees it; ``waited_s``: since it last had nodes."""
    return Candidate(
        trainer.name,
        curve,
        trainer.min_nodes,
        trainer.max_nodes,
        trainer.priority,
        None if trainer.finish_by_s is None else trainer.finish_by_s - at,
        None
        if trainer.total_samples is None
        else max((trainer.total_samples - samples) // trainer.replicas, 1),
        trainer.efficiency,
        waited_s,
    )
