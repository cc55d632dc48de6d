"""The simulated world around the controller in a replay. Actions take effect at once, and their
consequences happen in the same instant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from time import perf_counter

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.runtime import carry_out
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.replay.accounting import Accounts, Idle, Interruption, RecordedJob
from parsl_freetrain.replay.idle_causes import why_unused
from parsl_freetrain.replay.speed_measuring import Measuring


class World:
    """Nodes, fragments and their progress: the runtime
    (:class:`~parsl_freetrain.core.controller.runtime.Runtime`) of a replay.

    Parameters
    ----------
    controller
        The controller, the same as in the live system.
    accounts
        The accounts.
    trainers
        By name.
    measuring
        How their speeds are measured, which are then hidden from the controller; None: it knows
        them.
    """

    def __init__(
        self,
        controller: Controller,
        accounts: Accounts,
        trainers: dict[str, RecordedJob],
        measuring: Measuring | None = None,
    ) -> None:
        self._measuring = measuring
        self._controller = controller
        self._accounts = accounts
        self._runs = trainers
        self._interrupted: dict[str, tuple[tuple[int, float], Interruption]] = {}  # in this instant
        self._touched: dict[str, None] = {}
        self._followed: list[ev.Event] = []  # of the actions of one decision
        self._completions: list[tuple[float, int, str]] = []

    def next_completion_s(self) -> float | None:
        """When the next trainer reaches its total if nothing happens before; None if none runs."""
        while self._completions:
            at, version, name = self._completions[0]
            if self._runs[name].version == version:
                return at
            heappop(self._completions)
        return None

    def next_spent_s(self) -> float:
        """When the controller has to decide next if nothing happens before; infinite: never."""
        return self._controller.state.next_change_s()

    def next_measurement_s(self) -> float:
        """When the next speed is measured if nothing happens before; infinite: never."""
        return self._measuring.next_s(self._runs) if self._measuring else math.inf

    def happen(
        self,
        at: float,
        leaving: ev.NodesLeft | None,
        joining: Sequence[ev.NodesJoined],
        closing: Sequence[ev.BlockClosed],
        submitted: Sequence[RecordedJob],
    ) -> None:
        """Process all that happens at ``at``: nodes leave, others join, trainers finish and are
        submitted; then one decision is made.
        """
        self._accounts.advance(at)
        events: list[ev.Event] = []
        finished = self._finish(at)
        if leaving is not None:
            holder = self._controller.state.pool.holder
            losers = dict.fromkeys(
                name
                for node in leaving.nodes
                if (name := holder.get(node)) and name not in finished
            )
            due = [
                name
                for name in losers
                if (end := self._runs[name].deadline_s) is not None and end <= at
            ]
            events += (self._ended(name, at, Ending.STOPPED, Interruption.EXPIRED) for name in due)
            events.append(leaving)
        events += closing
        events += joining
        events += (self._ended(name, at, Ending.FINISHED, None) for name in finished)
        if self._measuring:
            events += self._measuring.due(at, self._runs)
        events += (ev.TrainerSubmitted(at, self._shown(run)) for run in submitted)
        if not events:  # a budget is spent, for which there is no event
            events.append(ev.Tick(at))
        began = perf_counter()
        while events:
            reply = self._controller.handle_all(events)
            self._followed = []
            carry_out(self, reply.actions, at)
            self._refuse_failures(reply.actions)
            events = self._followed
        thought_s = perf_counter() - began
        self._settle()
        pool = self._controller.state.pool
        free = len(pool.nodes) - self._accounts.used
        self._accounts.close_instant(
            len(pool.nodes),
            why_unused(self._controller, self._runs, at) if free else Idle(),
            thought_s,
        )

    def _shown(self, run: RecordedJob) -> Trainer:
        return replace(run.trainer, curve=None, class_curves=()) if self._measuring else run.trainer

    def _finish(self, at: float) -> dict[str, None]:
        finished: dict[str, None] = {}
        while (due := self.next_completion_s()) is not None and due <= at:
            name = heappop(self._completions)[2]
            finished[name] = None
        return finished

    def _ended(
        self, name: str, at: float, ending: Ending, cause: Interruption | None
    ) -> ev.FragmentEnded:
        run = self._runs[name]
        before = run.nodes, run.rate
        self._accounts.train(run, 0, 0.0)
        self._touched[name] = None
        if cause is None:
            run.samples, run.done_s = float(run.total), at
        else:
            self._interrupted.setdefault(name, (before, cause))
        return ev.FragmentEnded(at, name, run.fragment, max(int(run.samples), 0), ending)

    def open(self, block: object, at: float) -> None:
        """No effect, as of the next two: the trace determines the nodes."""

    close = release = open

    def launch(self, fragment: ev.StartFragment, at: float) -> None:
        """It trains from now on."""
        run, count = self._runs[fragment.trainer], len(fragment.nodes)
        node_class = self._controller.state.pool.nodes[fragment.nodes[0]].node_class
        curve = run.trainer.curve_on(node_class)
        self._accounts.train(run, count, curve.rate_at(count) if curve else 0.0)
        run.fragment, run.deadline_s = fragment.fragment, fragment.deadline_s
        self._touched[fragment.trainer] = None

    def send(self, stop: ev.StopFragment, at: float) -> None:
        """It stops at once."""
        self._end(stop, at, Ending.STOPPED, Interruption.STOPPED)

    def kill(self, fragment: ev.AbandonFragment, at: float) -> None:
        """It ends at once."""
        self._end(fragment, at, Ending.PREEMPTED, Interruption.PREEMPTED)

    def _end(
        self,
        action: ev.StopFragment | ev.AbandonFragment,
        at: float,
        ending: Ending,
        cause: Interruption,
    ) -> None:
        run = self._runs[action.trainer]
        if run.nodes and run.fragment == action.fragment:
            self._followed.append(self._ended(action.trainer, at, ending, cause))

    def _refuse_failures(self, actions: Sequence[ev.Action]) -> None:
        for action in actions:
            match action:
                case ev.EndTrainer(name, state, why) if (
                    state != 'finished' and not self._controller.settings.budgets
                ):
                    raise AssertionError(f'In a replay trainer {name} ended as {state}: {why}')

    def _settle(self) -> None:
        """Charge the costs of this instant, and predict completions again."""
        for name, (before, cause) in self._interrupted.items():
            if self._runs[name].done_s is None:
                self._accounts.charge(self._runs[name], before, cause)
        for name in self._touched:
            run = self._runs[name]
            if run.rate > 0:
                heappush(self._completions, (run.completion_s(), run.version, name))
                if self._measuring:
                    self._measuring.begin(run)
        self._interrupted.clear()
        self._touched.clear()
