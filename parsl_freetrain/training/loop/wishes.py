"""What this rank wishes to happen after a step, and what it tells the node agent."""

import json
import math
import time
from collections.abc import Callable

from parsl_freetrain.core.model.events import FragmentProgressed
from parsl_freetrain.training.checkpoint.source import open_checkpoint
from parsl_freetrain.training.comm.peers import Agreed, Agreement, on_any_rank
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.spec.mode import ROLLBACK, NonFinitePolicy, Reproducible


class Rollback:
    """Looks at a rank's state, and goes back with the others; last fine at ``fine_at``."""

    def __init__(
        self, parts: RankParts, model: Model, state: LoopState, policy: NonFinitePolicy
    ) -> None:
        self._peers, self._checkpointer = parts.peers, parts.checkpointer
        self._prepared, self._division = model.prepared, model.division
        self._steps, self._watch = model.steps, model.watch
        self._carried, self._modules = model.carried, model.modules
        self._state, self._policy = state, policy
        self._checks_each_step = isinstance(parts.order.spec.mode, Reproducible)
        self._times = 0
        self.fine_at = state.samples

    def spoilt_meanwhile(self) -> bool:
        """Whether a look at the state is due and finds it spoilt, on this rank."""
        answer = None if self._checks_each_step else self._watch.look(self._state.samples)
        if answer is None:
            return False
        samples, spoilt = answer
        if not spoilt:
            self.fine_at = samples
        return spoilt

    def due(self) -> bool:
        """Whether any rank's state is not finite. All take part, so all can name the culprit."""
        looks = self._policy.policy == ROLLBACK or not self._checks_each_step
        return looks and on_any_rank(self._peers, self._watch.spoilt())

    def sentence(self) -> str:
        return self._policy.sentence(self.fine_at, self._state.samples)

    def go_back(self) -> None:
        self._times += 1
        state = self._state

        def what() -> str:
            last = self._checkpointer.settled()
            return json.dumps([last.path if last else '', state.metrics.get('rollbacks', 0)])

        path, before = json.loads(self._peers.broadcast_object(f'back-{self._times}', what))
        self._policy.go_back(self.fine_at, state.samples, int(before), path, self._steps.culprit())
        print(
            f'Going back from {state.samples} samples to checkpoint {path}: numbers were not finite'
        )
        saved = open_checkpoint(path).load(self._prepared)  # what this rank needs of it
        self._division.restore(self._prepared, saved)
        self._modules.go_back(saved.modules)
        if self._division.whole:
            begins = saved.position.samples == saved.position.base
            self._carried.go_back(saved.variables, begins=begins)
        state.user.put_back(saved.position.user)
        state.samples = self.fine_at = state.reached = saved.position.samples
        state.reports.forget()
        state.metrics['rollbacks'] = before
        state.count('rollbacks')
        self._checkpointer.timing.count_from_here()


PROGRESS_EVERY_S = 0.5
BUSY_EVERY_S = 10.0  # during an evaluation, which makes no progress


class EvaluationStopped(BaseException):
    """Ends an evaluation, since the fragment has to stop."""


class Wishes:
    """One rank's wishes, on which all agree; ``near_end``: the next step may be an epoch's last."""

    def __init__(
        self, parts: RankParts, model: Model, state: LoopState, rollback: Rollback
    ) -> None:
        self._peers, self._channel, self._inbox = parts.peers, parts.channel, parts.inbox
        self._checkpointer, self._is_main = parts.checkpointer, parts.place.rank == 0
        self._steps, self._state, self._rollback = model.steps, state, rollback
        self._key = parts.order.key
        self._reported_at = 0.0
        self.near_end, self.steps_left = False, math.inf
        self.rate: float | None = None  # samples per second, behind the first step

    def after_step(self) -> Agreed:
        if self._rollback.spoilt_meanwhile():
            return Agreed.SPOILT
        if self._state.finishing:
            return Agreed.FINISH
        if self._stops(1 + self._steps.delay):
            return Agreed.STOP
        if not self._is_main:
            return Agreed.GO_ON
        if self._checkpointer.wants_to_save(near_end=self.near_end, steps_left=self.steps_left):
            return Agreed.SAVE
        due = time.monotonic() - self._reported_at >= PROGRESS_EVERY_S
        return Agreed.REPORT if due else Agreed.GO_ON

    def in_evaluation(self) -> Callable[[], None]:
        """To be called after each batch, equally often on all ranks; raises EvaluationStopped."""
        agreement = Agreement(self._peers)

        def look() -> None:
            if time.monotonic() - self._reported_at >= BUSY_EVERY_S:
                self.report(wait=False)
            decision = agreement.after_step(
                lambda: Agreed.STOP if self._stops(1) else Agreed.GO_ON,
                self._checkpointer.timing.time_left,
            )
            if decision == Agreed.STOP:
                raise EvaluationStopped

        return look

    def report(self, *, wait: bool) -> None:
        """Tell the node agent how far training is, which does not wait for it without ``wait``."""
        self._reported_at = time.monotonic()
        if self._is_main:
            now = time.time(), *self._key, self._state.samples, self.rate, self._state.metrics
            self._channel.send(FragmentProgressed(*now), wait=wait)

    def _stops(self, steps_ahead: int) -> bool:
        stop, timing = self._inbox.stop_requested(), self._checkpointer.timing
        timing.deadline = min(timing.deadline, self._inbox.deadline)
        return stop or (self._is_main and self._checkpointer.must_stop(steps_ahead))
