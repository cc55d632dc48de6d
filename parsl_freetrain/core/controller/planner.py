"""Makes one decision: states the problem, has it solved, stops and starts fragments."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from parsl_freetrain.core.allocation import constraints
from parsl_freetrain.core.allocation.objectives import Metric, follows_time, objective_named
from parsl_freetrain.core.allocation.problem import Allocator, Answer, Bid, Problem
from parsl_freetrain.core.controller import controller_state as cs
from parsl_freetrain.core.controller.bids import Bids, Places, places_of
from parsl_freetrain.core.controller.node_assignment import Order, Want, assign, first_end, foresee
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import nodes_text
from parsl_freetrain.core.model.types import Trainer


@dataclass
class Plan:
    """The allocator's answer, and how far it has been carried out."""

    asked: Problem
    answer: Answer
    holds_for: Problem  # after the actions so far; while it is the present one, the plan holds
    # to start: node counts by place
    waiting: dict[str, Mapping[str, int]] = field(default_factory=dict)


class Planner:
    """Turns the state into problems, answers into actions; see :class:`~.controller.Controller`."""

    def __init__(
        self, allocator: Allocator, settings: ControllerSettings, metric: Metric | None = None
    ) -> None:
        self._allocator, self._settings = allocator, settings
        named = objective_named(settings.metric, 'metric')
        timed = metric is None and follows_time(settings.metric)
        self._bids = Bids(settings, metric or named, timed=timed)
        self._plan: Plan | None = None

    def decide(self, state: cs.ControllerState, at: float, trigger: str) -> cs.Reply:
        """Ask the allocator, and start and stop fragments; a plan is carried through."""
        if state.shutting_down:
            return cs.Reply()
        places = self._places(state, at)
        problem = self._problem(state, at, places)
        plan, current = self._plan, self._bids.current
        actions: list[ev.Action] = []
        outdated = plan is None or problem != plan.holds_for
        if plan is None or outdated:
            asked, answer = self._answer(problem, state.active)
            plan = self._plan = Plan(asked, answer, problem)
            actions += self._stop(state, plan, places, current, at)
        actions += self._start(state, plan, places, at)
        if state.changed:
            plan.holds_for = self._problem(state, at, places)
        if not outdated and not actions:
            return cs.Reply()
        final, done = plan.answer, tuple(actions)
        what = problem.nodes, current, final.staying, final, plan.asked, done
        return cs.Reply(done, cs.Decision(at, trigger, *what))

    def problem(self, state: cs.ControllerState, at: float) -> Problem:
        """The problem that the allocator would get now; nothing is decided."""
        return self._problem(state, at, self._places(state, at))

    def _places(self, state: cs.ControllerState, at: float) -> Places:
        # Trainers that need longer than the horizon must see ends beyond it.
        settings = self._settings
        reach_s = max(settings.horizon_s, state.longest_s)
        return places_of(state, at, reach_s, state.shortest_s, settings.spans_blocks)

    def _problem(self, state: cs.ControllerState, at: float, places: Places) -> Problem:
        settings = self._settings
        limits = constraints.pool_limits(places.nodes, settings.max_nodes, settings.keep_free)
        if settings.caps or settings.min_shares:
            members = constraints.members_by_key(t.trainer for t in state.active.values())
            limits += constraints.owner_limits(members, settings.caps)
            useful = {name: t.useful_counts() for name, t in state.active.items()}
            caps = [m.most for m in limits if not m.members and m.most is not None]
            usable = min([places.nodes, *caps])
            limits += constraints.share_limits(members, settings.min_shares, useful, usable)
        horizon_s, spans = self._settings.horizon_s, self._settings.spans_blocks
        bids = self._bids.refresh(state, at, places)
        return Problem(horizon_s, places.nodes, bids, places.blocks, spans, tuple(limits))

    def _answer(
        self, problem: Problem, trainers: Mapping[str, cs.TrainerState]
    ) -> tuple[Problem, Answer]:
        """The answer, and its problem: without the last minimum shares that cannot be kept."""
        answer = self._allocator.allocate(problem)
        while answer.status == 'infeasible' and problem.limits and problem.limits[-1].least:
            problem = replace(problem, limits=problem.limits[:-1])
            answer = self._allocator.allocate(problem)
        return problem, pieces_in_order(problem, answer, trainers)

    def _stop(
        self,
        state: cs.ControllerState,
        plan: Plan,
        places: Places,
        current: Mapping[str, int],
        at: float,
    ) -> list[ev.Action]:
        changes = self._changes(plan, current)
        going = ((name, then, state.active[name].running) for name, then in changes)
        wants = [Want(name, then, run.nodes) for name, then, run in going if run]
        expected = foresee(wants, places.groups, state.pool, self._order(at))
        actions: list[ev.Action] = []
        for name, then in changes:
            trainer = state.active[name]
            if current[name]:
                running = trainer.running
                assert running is not None
                state.stop(name, running)
                trainer.rescaled_at = at
                now, count = current[name], sum(then.values())
                same = f'go on with {count} other nodes'
                why = same if now == count else f'rescale from {now} to {nodes_text(count)}'
                actions.append(ev.StopFragment(name, running.number, why, expected.get(name, ())))
            if then:
                plan.waiting[name] = then
        return actions

    def _changes(
        self, plan: Plan, current: Mapping[str, int]
    ) -> list[tuple[str, Mapping[str, int]]]:
        problem, answer = plan.asked, plan.answer
        if not problem.blocks:
            new = {name: n for name, n in answer.allocation.items() if n != current[name]}
            return [(name, {'': count} if count else {}) for name, count in new.items()]
        names = [block.name for block in problem.blocks]
        changes: list[tuple[str, Mapping[str, int]]] = []
        for bid in problem.bids:
            then = {block: count for block, count in answer.by_block[bid.name].items() if count}
            held = {name: n for name, n in zip(names, problem.held(bid), strict=True) if n}
            if then != held:
                changes.append((bid.name, then))
        return changes

    def _order(self, at: float) -> Order | None:
        habits = self._settings.habits
        return None if habits is None else lambda nodes: habits.order(nodes, at)

    def _start(
        self, state: cs.ControllerState, plan: Plan, places: Places, at: float
    ) -> list[ev.Action]:
        free = {k: counts for k, counts in plan.waiting.items() if state.active[k].running is None}
        every = [Want(name, counts, state.active[name].former) for name, counts in free.items()]
        if not every or not (wants := self._within_limits(state, places, every)):
            return []
        actions: list[ev.Action] = []
        for name, nodes in assign(wants, places.groups, state.pool, self._order(at)).items():
            trainer, until_s = state.active[name], first_end(nodes, state.pool)
            del plan.waiting[name]
            trainer.fragments += 1
            these, habits = [state.pool.nodes[node] for node in nodes], self._settings.habits
            classes = [node.node_class for node in these]
            action = ev.StartFragment(
                name,
                trainer.fragments,
                nodes,
                until_s,
                trainer.samples,
                trainer.shapes.next(len(nodes)),
                state.exempt_until(nodes, at),
                _speeds(trainer.trainer, classes),
                habits.interruptions_per_s(these, at) if habits is not None else None,
            )
            what = action.fragment, action.nodes, action.deadline_s, action.samples, action.shape
            running = cs.FragmentState(*what, node_class='+'.join(dict.fromkeys(classes)))
            state.start(name, trainer, running, at)
            actions.append(action)
        return actions

    def _within_limits(
        self, state: cs.ControllerState, places: Places, wants: list[Want]
    ) -> list[Want]:
        """Those allowed beside what still holds nodes: the answer holds once all stops are over."""
        caps, most, kept = self._settings.caps, self._settings.max_nodes, self._settings.keep_free
        if not (caps or most or kept):
            return wants
        used = Counter[str]()
        for name, count in Counter(state.pool.holder.values()).items():
            used.update(dict.fromkeys(constraints.keys_of(state.trainers[name].trainer), count))
        free = sum(len(group.free) for groups in places.groups.values() for group in groups)
        in_all = min(most or math.inf, len(state.pool.holder) + free - kept)
        limits: dict[str, float] = {**caps, constraints.EVERYBODY: in_all}
        allowed = []
        for want in wants:
            keys = constraints.keys_of(state.active[want.trainer].trainer)
            count = sum(want.counts.values())
            if all(used[key] + count <= limits.get(key, math.inf) for key in keys):
                allowed.append(want)
                used.update(dict.fromkeys(keys, count))
        return allowed


def _speeds(trainer: Trainer, classes: Sequence[str]) -> tuple[float, ...]:
    """How fast nodes of these classes are in one fragment, where they differ."""
    if not trainer.mixed_parts or len(set(classes)) < 2:
        return ()
    curves = dict(trainer.class_curves)
    return tuple(curves[name].rate_at(len(classes)) for name in classes)


def pieces_in_order(
    problem: Problem, answer: Answer, trainers: Mapping[str, cs.TrainerState]
) -> Answer:
    """The same answer, with other replicas where several bid alike for their next nodes: pieces of
    the earliest round come first, of these the ones that are nearly done. Of those that get nodes,
    the ones with more to train get the nodes that stay longer.
    """
    alike: dict[tuple[str, Bid], list[str]] = {}
    for bid in problem.bids:
        spec = trainers[bid.name].trainer
        if spec.round_samples and not bid.current_nodes:
            alike.setdefault((spec.training, replace(bid, name='')), []).append(bid.name)
    seconds = {block.name: block.remaining_s for block in problem.places}
    instead: dict[str, str] = {}

    def worth(name: str) -> tuple[float, int]:
        held = answer.by_block.get(name, {})
        return min((seconds[b] for b in held), default=0.0), answer.allocation[name]

    def left(name: str) -> tuple[int, float]:
        place = trainers[name]
        return place.trainer.left_of_round(place.samples)

    for names in alike.values():
        granted = sorted(filter(answer.allocation.get, names), key=worth)
        first, count = sorted(names, key=left), len(granted)
        chosen = sorted(first[:count], key=lambda name: left(name)[1])
        others = [name for name in names if name not in granted]
        instead |= zip(chosen + first[count:], granted + others, strict=True)
    if not instead:
        return answer
    allocation = {name: answer.allocation[instead.get(name, name)] for name in answer.allocation}
    by_block = {name: answer.by_block[instead.get(name, name)] for name in answer.by_block}
    return replace(answer, allocation=allocation, by_block=by_block)
