"""One decision: which trainer gets how many nodes now, and what has to be stopped and started for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.allocation import Allocator, Answer, Problem
from parsl_freetrain.core.assignment import Want, assign, first_end, foresee
from parsl_freetrain.core.bids import Bids
from parsl_freetrain.core.limits import caps_by_owner, owner_limits, pool_limits
from parsl_freetrain.core.objectives import Metric, follows_time, objective_named
from parsl_freetrain.core.places import Places, places_of
from parsl_freetrain.core.state import ControllerSettings, ControllerState, Decision, FragmentState, Reply


@dataclass
class Plan:
    """What the allocator answered, and how far it has been carried out.

    Attributes
    ----------
    asked, answer
        The question and its answer.
    became
        The question as it stands after what has been done for the plan. While nothing else happens, the plan stands.
    waiting
        Trainers that are to start, and on what, but have not yet: nodes by place.
    """

    asked: Problem
    answer: Answer
    became: Problem
    waiting: dict[str, Mapping[str, int]] = field(default_factory=dict)


class Planner:
    """Turns the state into problems, and the allocator's answers into actions.

    Parameters
    ----------
    metric
        The objective, where it is not the one that the settings name; it may depend on the trainer, but not on time.

    Raises
    ------
    BadInput
        If the settings name an unknown metric.
    """

    def __init__(self, allocator: Allocator, settings: ControllerSettings, metric: Metric | None = None) -> None:
        self._allocator = allocator
        self._settings = settings
        named = objective_named(settings.metric, 'metric')
        self._bids = Bids(settings, metric or named, timed=metric is None and follows_time(settings.metric))
        self._caps = caps_by_owner(settings.caps)
        self._plan: Plan | None = None

    def decide(self, state: ControllerState, at: float, trigger: str) -> Reply:
        """Ask the allocator and start or stop fragments accordingly; ``state`` is updated to match.

        A plan is carried through: that trainers stop and start for it changes the question, but not the answer. What it asked for
        costs less now, everything else as much as before.
        """
        if state.shutting_down:
            return Reply()
        places = self._places(state, at)
        problem = self._problem(state, at, places)
        plan, current = self._plan, self._bids.current
        actions: list[ev.Action] = []
        new = plan is None or problem != plan.became
        if plan is None or new:
            answer = self._allocator.allocate(problem)
            plan = self._plan = Plan(problem, answer, problem)
            actions += self._stop(state, plan, places, current, at)
        actions += self._start(state, plan, places, at)
        if state.changed:
            plan.became = self._problem(state, at, places)
        if not new and not actions:
            return Reply()
        return Reply(tuple(actions), Decision(
            at, trigger, problem.nodes, current, plan.answer.staying, plan.answer, plan.asked, tuple(actions)))

    def _places(self, state: ControllerState, at: float) -> Places:
        # Trainers that need longer than the horizon are told what goes before.
        return places_of(state, at, max(self._settings.horizon_s, state.longest_s), state.shortest_s, self._settings.spans_blocks)

    def _problem(self, state: ControllerState, at: float, places: Places) -> Problem:
        limits = pool_limits(places.nodes, self._settings.max_nodes, self._settings.keep_free)
        for what, most in self._caps.items():
            if most:
                limits += owner_limits(what, [(name, getattr(t.trainer, what)) for name, t in state.turn.items()], most)
        return Problem(self._settings.horizon_s, places.nodes, self._bids.refresh(state, at, places), places.blocks,
                       self._settings.spans_blocks, tuple(limits))

    def _stop(self, state: ControllerState, plan: Plan, places: Places, current: Mapping[str, int], at: float) -> list[ev.Action]:
        """Stop what is to go on with other nodes; note what is to start."""
        changes = self._changes(plan, current)
        expected = foresee([Want(name, then, running.nodes) for name, then in changes
                            if then and current[name] and (running := state.turn[name].running)], places.groups, state.pool)
        actions: list[ev.Action] = []
        for name, then in changes:
            trainer = state.turn[name]
            if current[name]:
                running = trainer.running
                assert running is not None
                state.stop(name, running)
                trainer.rescaled_at = at
                now, count = current[name], sum(then.values())
                why = f'rescale from {now} to {count} nodes' if now != count else f'go on with {count} other nodes'
                actions.append(ev.StopFragment(name, running.number, why, expected.get(name, ())))
            if then:
                plan.waiting[name] = then
        return actions

    def _changes(self, plan: Plan, current: Mapping[str, int]) -> list[tuple[str, Mapping[str, int]]]:
        """Whose nodes change, and to what, by place."""
        problem, answer = plan.asked, plan.answer
        if not problem.blocks:
            return [(name, {'': count} if count else {}) for name, count in answer.allocation.items() if count != current[name]]
        names = [block.name for block in problem.blocks]
        changes: list[tuple[str, Mapping[str, int]]] = []
        for bid in problem.bids:
            then = {block: count for block, count in answer.by_block[bid.name].items() if count}
            held = {name: count for name, count in zip(names, problem.held(bid), strict=True) if count}
            if then != held:
                changes.append((bid.name, then))
        return changes

    def _start(self, state: ControllerState, plan: Plan, places: Places, at: float) -> list[ev.Action]:
        """Start what is to start and can: the nodes it waits for may still be held by fragments that are ending."""
        wants = [Want(name, counts, state.turn[name].former)
                 for name, counts in plan.waiting.items() if state.turn[name].running is None]
        if not wants:
            return []
        actions: list[ev.Action] = []
        for name, nodes in assign(wants, places.groups, state.pool).items():
            trainer, until_s = state.turn[name], first_end(nodes, state.pool)
            del plan.waiting[name]
            trainer.fragments += 1
            action = ev.StartFragment(name, trainer.fragments, nodes, until_s, trainer.samples)
            state.start(name, trainer, FragmentState(action.fragment, action.nodes, action.deadline_s, action.samples))
            actions.append(action)
        return actions
