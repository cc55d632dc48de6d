"""The states that the ranks of a fragment have left in memory for the next one. No effects."""

from __future__ import annotations

from collections.abc import Iterator

from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.executor.fragment.fragment_state import FragmentResult, RunningFragment
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import StateLeft

Left = tuple[str, Handover]
"""A node, and the state in its memory."""


def left_states(fragment: RunningFragment, result: FragmentResult) -> tuple[Left, ...]:
    """The states that the next fragment may go on from, the best first.

    After a stop it is the one that rank 0 has committed, or has left for the next fragment to
    commit. After a loss it is the one that has seen the most samples: each rank leaves that of a
    global batch which it has finished, and all ranks that have finished one hold the same.
    """
    if result.ending is Ending.STOPPED:
        return tuple(_of_rank_0(fragment, result))
    if result.ending is not Ending.PREEMPTED:
        return ()
    found = sorted(_kept(fragment), key=lambda left: -left[1].samples)
    if fragment.begins_with is not None and not fragment.begins_with.path:
        found.append((fragment.action.nodes[0], fragment.begins_with))
    return tuple((node, left) for node, left in found if left.samples > result.checkpoint.samples)


def _of_rank_0(fragment: RunningFragment, result: FragmentResult) -> Iterator[Left]:
    last, outcome = result.checkpoint, fragment.outcome()
    if outcome is None or outcome.left is None:
        return
    digest, samples = outcome.left.digest, outcome.left.samples
    handover = Handover(digest, '', samples, fragment.number, outcome.metrics)
    if outcome.path is not None:
        if (samples, outcome.path) != (last.samples, last.path):
            return
        handover = Handover(digest, last.path, samples, last.fragment, last.metrics)
    kept = StateLeft(digest, samples, here=True)
    for member in fragment.members:
        for rank in fragment.results(member):
            if rank.outcome is not None and rank.outcome.left == kept:
                yield fragment.action.nodes[member], handover
                return


def _kept(fragment: RunningFragment) -> Iterator[Left]:
    """Those of ranks that have lost another one."""
    for member in fragment.members:
        for rank in fragment.results(member):
            if rank.outcome is None or rank.outcome.how != 'peer-lost':
                continue
            left = rank.outcome.left
            if left is None or left.needs > fragment.checkpoint.samples:
                continue  # a checkpoint that the user wants would be left out
            if rank.rank > 0 and fragment.uses_state:
                continue
            metrics = {**rank.outcome.metrics, **fragment.metrics}
            yield (
                fragment.action.nodes[member],
                Handover(left.digest, '', left.samples, fragment.number, metrics),
            )


def furthest(fragment: RunningFragment) -> int:
    """The largest number of samples that a rank has trained, as far as it is known."""
    said = (
        rank.outcome.samples
        for member in fragment.settled
        for rank in fragment.results(member)
        if rank.outcome is not None
    )
    return max((fragment.reached, *said))
