"""One decision: which trainer gets how many nodes now, and what has to be stopped and started for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.allocation import Allocator, Answer, Bid, Problem
from parsl_freetrain.core.assignment import FreeNode, pick_nodes
from parsl_freetrain.core.milp import stay_put
from parsl_freetrain.core.objectives import metric_named
from parsl_freetrain.core.state import ControllerSettings, ControllerState, Decision, FragmentState, Reply, TrainerState


@dataclass(frozen=True)
class Plan:
    """What the allocator answered, put together.

    Attributes
    ----------
    answer
        Nodes by trainer.
    staying
        The objective of keeping what runs.
    home
        The block that a trainer's nodes have to be taken from; not a key: any.
    new
        Whether the allocator had to be asked.
    """

    answer: Answer
    staying: float
    home: Mapping[str, str]
    new: bool


class Planner:
    """Turns the state into problems, and the allocator's answers into actions.

    Raises
    ------
    BadInput
        If the settings name an unknown metric.
    """

    def __init__(self, allocator: Allocator, settings: ControllerSettings) -> None:
        self._allocator = allocator
        self._settings = settings
        self._metric = metric_named(settings.metric)
        self._answers: dict[Problem, Answer] = {}  # of the last decision

    def decide(self, state: ControllerState, event: ev.Event) -> Reply:
        """Ask the allocator and start or stop fragments accordingly; ``state`` is updated to match."""
        if state.shutting_down:
            return Reply()
        pool = self._pool(state, event.at)
        bidders = state.bidders(self._settings)
        bids = self._bids(bidders, event.at)
        if self._settings.spans_blocks:
            plan = self._plan_anywhere(bids, pool)
        else:
            plan = self._plan_by_block(bids, pool, bidders)
        actions = self._stop(bidders, plan, event.at) + self._start(state, bidders, plan, pool)
        if not plan.new and not actions:
            return Reply()
        return Reply(tuple(actions), Decision(
            event.at, type(event).__name__, len(pool), {bid.name: bid.current_nodes for bid in bids.values()},
            plan.staying, plan.answer, tuple(actions)))

    def _pool(self, state: ControllerState, at: float) -> dict[str, FreeNode]:
        """Nodes worth giving away: they last, and what holds them now can be moved."""
        leaving = {n for t in state.trainers.values() if t.cancelled and t.running for n in t.running.nodes}
        return {name: node for name, node in state.nodes.items()
                if name not in leaving and (node.until_s is None or node.until_s - at >= self._settings.min_hole_s)}

    def _bids(self, bidders: list[TrainerState], at: float) -> dict[str, Bid]:
        """A bid by trainer; one whose fragment is ending has paid for its change and bids as if it held nothing."""
        known = [r for t in bidders if (r := t.profile.one_node_rate()) is not None]
        typical = sum(known) / len(known) if known else 1.0
        bids = {}
        for trainer in bidders:
            running, spec = trainer.running, trainer.trainer
            current = 0 if running is None or running.ending(at, self._settings.min_hole_s) else len(running.nodes)
            curve = self._metric(trainer.profile.curve(spec.max_nodes, typical))
            bids[spec.name] = Bid(
                spec.name, spec.min_nodes, spec.max_nodes, current, spec.rescale_up_s, spec.rescale_down_s, curve)
        return bids

    def _plan_anywhere(self, bids: dict[str, Bid], pool: dict[str, FreeNode]) -> Plan:
        problem = Problem(self._settings.horizon_s, len(pool), tuple(bids.values()))
        known = self._answers.get(problem)
        answer = known or self._allocator.allocate(problem)
        self._answers = {problem: answer}
        return Plan(answer, problem.objective(stay_put(problem)), {}, known is None)

    def _plan_by_block(self, bids: dict[str, Bid], pool: dict[str, FreeNode], bidders: list[TrainerState]) -> Plan:
        """One problem for each block, the emptiest first: what runs in it, and whoever has no nodes yet.

        Each block's answer is optimal for it, so that whatever is decided fits into one block; the whole need not
        be: nothing leaves a small block for a larger one before its fragment ends.
        """
        sizes: dict[str, int] = {}
        for node in pool.values():
            sizes[node.block] = sizes.get(node.block, 0) + 1
        home = {t.trainer.name: pool[t.running.nodes[0]].block
                for t in bidders if t.running and bids[t.trainer.name].current_nodes}
        free = dict(sizes)
        for name, block in home.items():
            free[block] -= bids[name].current_nodes
        asked: dict[Problem, Answer] = {}
        merged = dict.fromkeys(bids, 0)
        objective = staying = seconds = 0.0
        for block in sorted(sizes, key=lambda b: (-free[b], b)):
            here = tuple(bid for name, bid in bids.items() if home.get(name, block) == block)
            problem = Problem(self._settings.horizon_s, sizes[block], here)
            answer = asked[problem] = self._answers.get(problem) or self._allocator.allocate(problem)
            for name, count in answer.allocation.items():
                if count:
                    merged[name], home[name] = count, block
            objective += answer.objective
            staying += problem.objective(stay_put(problem))
            seconds += answer.seconds
        new = not asked.keys() <= self._answers.keys()
        self._answers = asked
        exact = len(asked) <= 1 and all(answer.status == 'optimal' for answer in asked.values())
        solver = next((answer.solver for answer in asked.values()), '')
        return Plan(Answer('optimal' if exact else 'feasible', objective, solver, seconds, merged), staying, home, new)

    def _stop(self, bidders: list[TrainerState], plan: Plan, at: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for trainer in bidders:
            running = trainer.running
            if running is None or running.ending(at, self._settings.min_hole_s):
                continue
            now, then = len(running.nodes), plan.answer.allocation[trainer.trainer.name]
            if now != then:
                running.stopping = True
                why = f'rescale from {now} to {then} nodes'
                actions.append(ev.StopFragment(trainer.trainer.name, running.number, why))
        return actions

    def _start(self, state: ControllerState, bidders: list[TrainerState], plan: Plan,
               pool: dict[str, FreeNode]) -> list[ev.Action]:
        busy = state.busy()
        free = {name: node for name, node in pool.items() if name not in busy}
        actions: list[ev.Action] = []
        for trainer in bidders:
            count = plan.answer.allocation[trainer.trainer.name]
            if trainer.running is not None or count == 0:
                continue
            home = plan.home.get(trainer.trainer.name)
            within = free if home is None else {name: node for name, node in free.items() if node.block == home}
            nodes = pick_nodes(within, count, self._settings.spans_blocks)
            if not nodes:
                continue  # what it is waiting for is still held by a fragment that is ending
            ends = [free.pop(name).until_s for name in nodes]
            deadline = min((end for end in ends if end is not None), default=math.inf)
            trainer.fragments += 1
            action = ev.StartFragment(trainer.trainer.name, trainer.fragments, nodes,
                                      None if math.isinf(deadline) else deadline, trainer.samples)
            trainer.running = FragmentState(action.fragment, action.nodes, action.deadline_s, action.samples)
            actions.append(action)
        return actions
