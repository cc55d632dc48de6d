"""The states that the ranks of a fragment have left in memory for the next one. No effects."""

from __future__ import annotations

from collections.abc import Iterator

from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.executor.fragment.fragment_state import (
    FragmentResult,
    LeftState,
    RunningFragment,
)
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import Outcome, StateLeft


def left_states(fragment: RunningFragment, result: FragmentResult) -> tuple[LeftState, ...]:
    """The states that the next fragment may go on from, the best first. What is committed is found
    by its digests. After a stop it is the one that rank 0 has left to be committed. After a loss it
    is the one with the most samples: each rank leaves that of a global batch which it has finished,
    and all ranks that have finished one hold the same, or their parts of it.
    """
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
    said = (
        rank.outcome.samples
        for member in fragment.settled
        for rank in fragment.results(member)
        if rank.outcome is not None
    )
    return max((fragment.reached, *said))
