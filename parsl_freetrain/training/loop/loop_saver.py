"""Collecting the state of all ranks, comparing what each of them holds, and saving it."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.frozen import untrained
from parsl_freetrain.training.checkpoint.outer import weights_of
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of
from parsl_freetrain.training.comm.peers import gather_bytes
from parsl_freetrain.training.loop.last_step import LastStep
from parsl_freetrain.training.loop.loop_state import LoopState, Phase
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.replicas import Replicas
from parsl_freetrain.training.loop.verification import Verification
from parsl_freetrain.training.loop.wishes import Rollback
from parsl_freetrain.training.spec.messages import StateLeft
from parsl_freetrain.training.steps.mesh import put_parts_back


class LoopSaver:
    """Saves the state of a loop, with ``position_at`` and what has changed."""

    def __init__(
        self,
        parts: RankParts,
        model: Model,
        state: LoopState,
        position_at: Callable[[int], Position],
        last: LastStep,
        rollback: Rollback,
        verification: Verification,
    ) -> None:
        self._checkpointer, self._is_main = parts.checkpointer, parts.place.rank == 0
        self._model, self._state, self._position_at = model, state, position_at
        self._last, self._rollback, self._verification = last, rollback, verification
        self._peers = parts.peers
        self._user_text = json.dumps(state.user.values, default=repr)
        self._replicas, self._fragment = Replicas(parts, model), parts.order.fragment

    def save(self, how: Callable[[Any, int, Mapping[str, float]], None]) -> None:
        """Save the state, by one of the methods of the checkpointer. All ranks call this."""
        state = self._state
        if state.wanted is not None:
            self._last.needs = state.samples
        self._model.structure.check()
        self._replicas.check()
        self._check_user_state()
        if state.reports.means.used:
            state.reports.means.gather(self._peers)
        how(self._collect, state.samples, {**state.metrics, **(state.wanted or {})})
        state.wanted = None
        self._verification.saved()

    def _check_user_state(self) -> None:
        """Raises BadInput if ranks have changed ``ctx.state`` in the loop, each in its own way."""
        values, peers = self._state.user.values, self._peers
        text = json.dumps(values, default=repr)
        own = text.encode() if text != self._user_text else b''
        digest = hashlib.blake2b(own, digest_size=8).digest() if own else b''
        if len(set(gather_bytes(peers, digest, 8)) - {b''}) < 2:
            return
        said = [json.loads(one) if one else None for one in gather_bytes(peers, own)]
        (first, one), *others = [(r, one) for r, one in enumerate(said) if one is not None]
        rank, other, key = next(
            (rank, other, key)
            for rank, other in others
            for key in {**one, **other}
            if one.get(key) != other.get(key)
        )
        raise BadInput(
            f'ctx.state[{key!r}] is {one.get(key)!r} on rank {first} and {other.get(key)!r} on '
            f'rank {rank}: in the body of ctx.loop each rank sees its own samples only. Give '
            'numbers to ctx.report, whose means over an epoch are ctx.epoch_means, or set it at '
            'the end of an epoch from what is the same on all ranks.'
        )

    def save_wanted(self) -> None:
        if self._state.wanted is not None:
            self.save(self._checkpointer.save_beside)

    def make_room(self) -> None:
        """Have the memory for copies made. Call it after the first step: optimizers have states."""
        division = self._model.division
        if division.saves and not division.pipelined:
            state = self._state_of(content_of(self._model.prepared, named=division.stated))
            names = untrained(self._model.prepared, state)
            self._checkpointer.make_room(division.part_of(state), names)

    def leave(self) -> StateLeft | None:
        """Leave the last batch's state in memory when a rank is lost; None if this one does not."""
        division, prepared = self._model.division, self._model.prepared
        if self._state.reports.means.used or self._model.carried.differs:
            return None  # other ranks had a part of the sums, or of a table

        def state() -> State:
            put_parts_back(prepared.models)
            found = self._state_of(content_of(prepared, named=division.stated), at_end=True)
            return division.held(found, knows_all=self._last.knows_all)

        left = self._last.leave(state)
        self._verification.lost(self._state.samples)
        return left

    def _collect(self) -> State | None:
        """What this rank writes; None: nothing. All ranks that hold a part of the state call it."""
        division = self._model.division
        if not division.saves:
            return None
        if self._model.watch.spoilt():
            raise BadInput(self._rollback.sentence())
        content = division.collect(self._model.prepared)
        return None if content is None else division.part_of(self._state_of(content))

    def _state_of(self, content: Mapping[str, Any], *, at_end: bool = False) -> State:
        """``at_end``: variables and settings are those at the end of the last batch."""
        state = self._state
        if self._is_main:
            state.user.text()  # raises BadInput if it cannot be saved
        position = replace(
            self._position_at(state.samples),
            checkpoint_s=self._checkpointer.timing.longest_s,
            user=state.user.values if self._is_main else {},
            means=state.reports.means.sums,
            epoch_due=state.epoch_due,
            finishing=state.finishing,
            finished=state.phase is Phase.FINISHED,
            result=state.result,
            fragment=self._fragment,
            resumes=state.resumes,
            verified=state.verified,
            round_ended=state.round_ended,
            round_from=state.round_from,
            weights=dict(weights_of(self._model.prepared)) if state.round_ended else {},
        )
        finished, modules = state.phase is Phase.FINISHED, self._model.modules.changed()
        if at_end:
            variables, modules['settings'] = self._last.variables, self._last.settings
        else:
            variables = self._model.carried.state(finished=finished)
        if not self._model.division.whole:  # ranks could hold different ones
            modules['buffers'] = {}
        return collect({**content, 'modules': modules, 'variables': variables}, position)
