"""Replays the recorded events of a live run: each decision is made in its real state."""

import math
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import structs

from parsl_freetrain.core.allocation.problem import Allocator, Answer, Problem
from parsl_freetrain.core.controller.controller import Controller, DecisionFailed
from parsl_freetrain.core.controller.controller_state import ControllerState, Reply
from parsl_freetrain.core.controller.planner import Planner
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import RunState
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.solver import allocator_named


@dataclass(frozen=True)
class Choice:
    allocation: dict[str, int]  # nodes by trainer
    # expected, over keeping everything, in the objective's unit; None: not finite
    gain_per_s: float | None


@dataclass(frozen=True)
class Difference:
    batch: int  # the number of its batch of events
    at_s: float  # since the run began
    trigger: str  # the classes of the events
    run: Choice
    replay: Choice | None  # None: no decision there


@dataclass(frozen=True)
class RunReplay:
    run: str
    settings: DecisionSettings
    decisions: int
    same: int  # decisions of the run that the replay makes, too
    reproduced: int  # that the run's own settings reproduce
    run_gain_per_s: float | None  # the mean over all problems given to the solver
    replay_gain_per_s: float | None
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            'run': self.run,
            'decisions': self.decisions,
            'same': self.same,
            'reproduced': self.reproduced,
            'settings': {
                'solver': self.settings.solver,
                'horizon_s': self.settings.controller.horizon_s,
                'objective': self.settings.controller.metric,
            },
            'gain_per_s': {'run': self.run_gain_per_s, 'replay': self.replay_gain_per_s},
            'differences': [asdict(difference) for difference in self.differences],
        }


def changed(
    run: RunState,
    solver: str | None = None,
    horizon_s: float | None = None,
    metric: str | None = None,
    time_limit_s: float | None = None,
) -> DecisionSettings:
    """A run's settings, with some replaced; BadInput if one is missing or invalid."""
    own = DecisionSettings.of(run.began)
    if own is None:
        raise BadInput(f'The ledger has no settings of run {run.name!r}; it cannot be replayed.')
    if own.solver is None:
        raise BadInput(
            f'Run {run.name!r} used an allocator of its own, which the ledger does not have; only '
            'runs with a solver that has a name can be replayed.'
        )
    horizon_s = own.controller.horizon_s if horizon_s is None else horizon_s
    limit_s = own.time_limit_s if time_limit_s is None else time_limit_s
    new = {'horizon_s': horizon_s, 'metric': metric or own.controller.metric}
    controller = ControllerSettings(**{**structs.asdict(own.controller), **new})
    return DecisionSettings(controller, solver or own.solver, limit_s)


def replay_run(journal: Journal, run: RunState, settings: DecisionSettings) -> RunReplay:
    """Repeat a run's decisions with ``settings`` from :func:`changed`; or BadInput."""
    own = changed(run)
    asked = _Asked(_allocator(own), None if settings == own else settings)
    controller = Controller(asked, own.controller)
    asked.state = controller.state
    decisions = reproduced = same = batches = 0
    differences: list[Difference] = []
    for batch in journal.batches(run):
        batches += 1
        asked.at = batch.at
        reply = Reply()
        # After an error the run went on, too.
        with suppress(ValueError, DecisionFailed):
            reply = controller.handle_all(batch.events, batch.at)
        if asked.error is not None:
            raise asked.error
        was, again = batch.decided, reply.decision
        if not was.trigger:
            continue
        decisions += 1
        as_before = again is not None and (
            (again.current, again.answer.allocation, reply.actions)
            == (was.current, was.allocation, was.actions)
        )
        reproduced += as_before
        agrees = as_before
        if asked.other is not None:
            agrees = asked.answers[-1][1].allocation == was.allocation if asked.answers else False
        if agrees:
            same += 1
            continue
        gain = (was.objective - was.staying) / own.controller.horizon_s
        new = _decided(asked.answers[-1][1], settings) if again and asked.answers else None
        old = Choice(was.allocation, _finite(gain))
        differences.append(Difference(batch.seq, batch.at - run.began.at, was.trigger, old, new))
    if not batches:
        raise BadInput(
            f'The ledger has no events of run {run.name!r} to replay; its runs of '
            'freetrain run or of a FreeTrainExecutor have them.'
        )
    mine = _mean([_decided(one, own) for one, _ in asked.answers])
    others = _mean([_decided(other, settings) for _, other in asked.answers])
    counts = decisions, same, reproduced
    return RunReplay(run.name, settings, *counts, mine, others, tuple(differences))


class _Asked:
    """Answers like the run's solver, to follow the run, and records those of other settings."""

    state: ControllerState

    def __init__(self, own: Allocator, other: DecisionSettings | None) -> None:
        self._own = own
        self._allocator = own if other is None else _allocator(other)
        self.other = None if other is None else Planner(self._allocator, other.controller)
        self._names: dict[str, None] = {}
        self.at = 0.0
        self.answers: list[tuple[Answer, Answer]] = []
        self.error: BadInput | None = None

    def allocate(self, problem: Problem) -> Answer:
        answer = self._own.allocate(problem)
        other = answer
        if self.other is not None:
            # Renew all bids, without a trace in the state.
            self._names |= dict.fromkeys(self.state.trainers)
            state = copy(self.state)
            state.changed = dict(self._names)
            try:
                other = self._allocator.allocate(self.other.problem(state, self.at))
            except BadInput as error:
                self.error = error
        self.answers.append((answer, other))
        return answer


def _allocator(settings: DecisionSettings) -> Allocator:
    assert settings.solver is not None
    # No child process is needed: a crash of the solver ends only the replay.
    return allocator_named(settings.solver, settings.time_limit_s, isolated=False)


def _decided(answer: Answer, settings: DecisionSettings) -> Choice:
    gain = answer.objective - answer.staying
    return Choice(dict(answer.allocation), _finite(gain / settings.controller.horizon_s))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(decided: Sequence[Choice]) -> float | None:
    known = [d.gain_per_s for d in decided if d.gain_per_s is not None]
    return sum(known) / len(known) if known else None
