"""The executor's record of a trainer, beside the controller's: future, spec, how to submit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.core.model.types import Checkpoint, Trainer
from parsl_freetrain.executor.fragment.fragment_state import (
    FragmentResult,
    LeftState,
    RunningFragment,
)
from parsl_freetrain.executor.fragment.left_states import left_states
from parsl_freetrain.executor.fragment.rank_result import RankResult
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.training.spec.training import TrainingSpec

logger = logging.getLogger(__name__)


Launch = Callable[[Mapping[str, Any], 'Future[Checkpoint] | Checkpoint'], 'Future[Checkpoint]']


@dataclass
class TrainerRecord:
    trainer: Trainer
    spec: TrainingSpec
    store: str  #: its checkpoint folder
    #: Submits a fragment, with resources and a checkpoint, and returns its checkpoint future.
    launch: Launch
    future: TrainingFuture
    checkpoint: Checkpoint  #: the newest committed checkpoint
    fragments_before: int = 0
    task: Future[Checkpoint] | None = None
    last_good: Future[Checkpoint] | None = None
    failure: Callable[[], BaseException] | None = None  # loads the last one of the user's code
    left: tuple[
        LeftState, ...
    ] = ()  # the states that the last fragment left in memory, the best first
    device_faults: dict[str, set[str]] = field(
        default_factory=dict
    )  # by message, the names of the nodes
    paused: tuple[int, float] | None = (
        None  # during a rescale: number of nodes before it, and end of the last step
    )

    def total_known(self, total_samples: int) -> None:
        """Set the total of a trainer that is measured in epochs; raises BadInput if it is 0."""
        self.trainer = replace(self.trainer, total_samples=total_samples)

    def ranks_on(self, accelerators: Sequence[int]) -> int:
        """Ranks on each node with so many accelerators. The first answer fixes the shards."""
        per_node = self.spec.ranks_on(accelerators)
        if self.spec.ranks.per_node is None and per_node < max(accelerators, default=0):
            logger.warning(
                'Trainer %s uses %d accelerators of each node, and its nodes have %s: to use all, '
                'train on nodes with equal numbers, and in reproducible mode say shards=, at least '
                'as many as the maximum number of nodes has accelerators.',
                self.trainer.name,
                per_node,
                ', '.join(map(str, sorted(accelerators))),
            )
        self.spec = structs.replace(self.spec, mode=self.spec.with_ranks(per_node).mode)
        return per_node

    def fragment_ended(self, result: FragmentResult, faults: Iterable[RankResult] = ()) -> None:
        """Update what the next fragment starts from. ``faults``: ranks with a broken device."""
        for rank in faults:
            self.device_faults.setdefault(rank.fault, set()).add(rank.node)
        if result.checkpoint.path:
            self.checkpoint = result.checkpoint
        self.failure = result.exception or self.failure
        if result.ending is not Ending.FAILED:
            self.last_good = self.task

    def pause(self, fragment: RunningFragment, result: FragmentResult) -> None:
        """Record a fragment's end: the state left in memory, and for a rescale its last step."""
        outcome = fragment.outcome()
        self.left = left_states(fragment, result)
        idle_s = outcome.idle_s if outcome is not None else None
        self.paused = (
            (len(fragment.members), fragment.ended[0][0] - idle_s)
            if fragment.stopping.goes_on
            and result.ending is Ending.STOPPED
            and idle_s is not None
            and 0 in fragment.ended.get(0, ())
            else None
        )

    def resume(self, nodes: tuple[str, ...]) -> LeftState | None:
        """The best state that these nodes have in memory; None: they have none."""
        left, self.left = self.left, ()
        return next((state for state in left if state.on(nodes)), None)
