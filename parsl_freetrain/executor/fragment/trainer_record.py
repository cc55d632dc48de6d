"""The executor's record of a trainer, beside the controller's: future, spec, how to submit."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import structs

from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.core.model.types import Checkpoint, Trainer
from parsl_freetrain.executor.fragment.fragment_state import (
    FragmentResult,
    LeftState,
    RunningFragment,
)
from parsl_freetrain.executor.fragment.member_order import RankResult
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import Outcome, StateLeft
from parsl_freetrain.training.spec.training import TrainingSpec

logger = logging.getLogger(__name__)

_ROUNDS_KNOWN = 4  # with overlap, the slowest replica needs the third one before the newest
Launcher = Callable[[Mapping[str, Any], 'Future[Checkpoint] | Checkpoint'], 'Future[Checkpoint]']


class TellReplica(NamedTuple):
    """How far a replica in another executor is (None: it has ended), or how it ended all."""

    training: str
    trainer: str
    samples: int | None = None
    ending: str = ''
    why: str = ''


@dataclass
class TrainerRecord:
    trainer: Trainer
    spec: TrainingSpec
    store: str  #: its checkpoint folder
    #: Submits a fragment, with resources and a checkpoint, and returns its checkpoint future.
    launch: Launcher
    future: TrainingFuture
    checkpoint: Checkpoint  #: the newest committed checkpoint
    fragments_before: int = 0
    #: Of a replica: tell the other executors that train its training.
    tell_others: Callable[[TellReplica], None] | None = None
    #: Of all replicas: by number and samples, what was handed in. All executors have it.
    handed_in: dict[tuple[int, int], str] = field(default_factory=dict)
    changed_at: str = ''  #: the checkpoint from which it goes on with other arguments
    task: Future[Checkpoint] | None = None
    last_good: Future[Checkpoint] | None = None
    failure: Callable[[], BaseException] | None = None  # loads the last one of the user's code
    #: The states that the last fragment left in memory, the best first.
    left: tuple[LeftState, ...] = ()
    #: By message, the names of the nodes.
    device_faults: dict[str, set[str]] = field(default_factory=dict)
    #: During a rescale: number of nodes before it, and end of the last step.
    paused: tuple[int, float] | None = None

    def note_handed_in(self, checkpoint: Checkpoint) -> None:
        if checkpoint.handed_in:
            replica = self.spec.replica
            self.handed_in[replica, checkpoint.samples] = checkpoint.handed_in
            own = sorted(key for key in [*self.handed_in] if key[0] == replica)
            for old in own[:-_ROUNDS_KNOWN]:
                del self.handed_in[old]

    def ranks_on(self, accelerators: Sequence[int]) -> int:
        """Ranks on each node with so many accelerators. The first answer fixes the shards."""
        per_node = self.spec.ranks_on(accelerators)
        if self.spec.ranks.per_node is None and per_node < max(accelerators, default=0):
            have = ', '.join(map(str, sorted(accelerators)))
            logger.warning(
                f'Trainer {self.trainer.name} uses {per_node} accelerators of each node, and its '
                f'nodes have {have}: to use all, train on nodes with equal numbers, and in '
                'reproducible mode say shards=, at least as many as the maximum number of nodes '
                'has accelerators.'
            )
        self.spec = structs.replace(self.spec, mode=self.spec.with_ranks(per_node).mode)
        return per_node

    def fragment_ended(self, result: FragmentResult, faults: Iterable[RankResult] = ()) -> None:
        """Update what the next fragment starts from. ``faults``: ranks with a broken device."""
        for rank in faults:
            self.device_faults.setdefault(rank.fault, set()).add(rank.node)
        if result.checkpoint.path:
            self.checkpoint = result.checkpoint
            self.note_handed_in(result.checkpoint)  # it may overtake the message about it
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


def left_states(fragment: RunningFragment, result: FragmentResult) -> tuple[LeftState, ...]:
    """What the next fragment may go on from, the best first: rank 0's, or last batches'."""
    if result.ending is Ending.STOPPED:
        return tuple(_of_rank_0(fragment))
    if result.ending is not Ending.PREEMPTED:
        return ()
    found = sorted(_of_survivors(fragment), key=lambda left: -left.handover.samples)
    if fragment.begins_with is not None:
        found.append(fragment.begins_with)
    return tuple(left for left in found if left.handover.samples > result.checkpoint.samples)


def _of_rank_0(fragment: RunningFragment) -> Iterator[LeftState]:
    outcome = fragment.outcome()
    if outcome is None or outcome.left is None or outcome.path is not None:
        return
    digest, samples = outcome.left.digest, outcome.left.samples
    kept = StateLeft(digest, samples, here=True)
    nodes = frozenset(node for node, its, _ in _outcomes(fragment) if its.left == kept)
    if nodes:
        yield LeftState(Handover(((digest,),), samples, outcome.metrics), (nodes,))


def _of_survivors(fragment: RunningFragment) -> Iterator[LeftState]:
    """Those of ranks that have lost another one; of a state in parts, if there is each of them."""
    found: dict[int, list[tuple[str, StateLeft]]] = {}
    metrics = dict(fragment.metrics)
    for node, outcome, rank in _outcomes(fragment):
        left = outcome.left
        if outcome.how != 'peer-lost' or left is None:
            continue
        if left.needs > fragment.checkpoint.samples:
            continue  # a checkpoint that the user wants would be left out
        if left.part == 0 and rank > 0 and fragment.uses_state:
            continue  # what is not a tensor is taken from the first part
        found.setdefault(left.samples, []).append((node, left))
        metrics = {**outcome.metrics, **metrics}
    for samples, those in found.items():
        numbers = range(those[0][1].parts)
        parts = [[(node, left.digest) for node, left in those if left.part == i] for i in numbers]
        if all(parts):
            digests = tuple(tuple(digest for _, digest in part) for part in parts)
            nodes = tuple(frozenset(node for node, _ in part) for part in parts)
            yield LeftState(Handover(digests, samples, metrics), nodes)


def _outcomes(fragment: RunningFragment) -> Iterator[tuple[str, Outcome, int]]:
    for member in fragment.members:
        for rank in fragment.results(member):
            if rank.outcome is not None:
                yield fragment.action.nodes[member], rank.outcome, rank.rank


def furthest(fragment: RunningFragment) -> int:
    """The largest number of samples that a rank has trained, as far as it is known."""
    return max((fragment.reached, *(outcome.samples for _, outcome, _ in _outcomes(fragment))))
