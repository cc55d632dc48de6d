"""Going back to the last checkpoint when numbers of the state are no longer finite."""

from __future__ import annotations

import json

from parsl_freetrain.training.comm.peers import on_any_rank
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
        saved = self._division.read(path, self._prepared)
        self._division.restore(self._prepared, saved)
        state.user.put_back(saved.position.user)
        state.samples = self.fine_at = state.reached = saved.position.samples
        state.reports.forget()
        state.metrics['rollbacks'] = before
        state.count('rollbacks')
        self._checkpointer.timing.count_from_here()
