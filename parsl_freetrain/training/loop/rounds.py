"""Rounds of pieces, in a rank: with which weights a piece begins, and what it cannot do."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.events import CheckpointSaved, RoundKnown, TotalKnown
from parsl_freetrain.training.checkpoint import outer
from parsl_freetrain.training.checkpoint.handed_in import EndElsewhere
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.outer_means import End, EndDamaged, end_of_round
from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.loop.loop_data import BatchSource
from parsl_freetrain.training.loop.loop_state import FragmentEnd, LoopState, Phase
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.spec import diloco as spec
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.mode import Reproducible

_TRIES = 3  # another replica may make the weights meanwhile


def refuse(order: FragmentOrder, what: str, instead: str) -> None:
    if order.spec.diloco is not None:
        raise BadInput(f'{what} is not possible with mode=DiLoCo(...): {instead}.')


def tell_round(parts: RankParts, batches: BatchSource, total: int) -> None:
    """Tell how long a round is; BadInput if the function has several loops."""
    if batches.order.total_samples < total:
        refuse(parts.order, 'A second ctx.loop', 'train in one')
    if batches.round_samples and parts.place.rank == 0:
        length = batches.round_samples
        parts.channel.send(RoundKnown(time.time(), parts.order.trainer, length))


def next_round(parts: RankParts, state: LoopState) -> Source | None:
    """Where to go on, with a round's outer step done; FragmentEnd if others lack, or at the end."""
    order, saved = parts.order, parts.saved
    diloco = order.spec.diloco
    if diloco is None or saved is None:
        return saved
    there = saved.position
    length = diloco.steps * there.batch_size
    weights, ends = weights_of(order), there.samples == there.total_samples
    begun = there.samples // length * length
    at = begun if ends else diloco.begins_with(begun, length)  # the last weights are of all rounds
    known = parts.checkpointer.last
    if parts.place.rank == 0 and known and known.handed_in and known.samples > order.samples:
        parts.channel.send(CheckpointSaved(time.time(), known))  # a kill came before it was told
    if not there.round_ended:
        state.round_from = there.round_from
        if parts.place.rank == 0:
            weights.check(at, there.round_from)
        return saved
    if parts.place.rank == 0:
        parts.channel.send(RoundKnown(time.time(), order.trainer, length))
        if order.spec.total_epochs is not None:
            parts.channel.send(TotalKnown(time.time(), order.trainer, there.total_samples))
    if order.spec.replica and ends:
        state.phase = Phase.FINISHED
        raise FragmentEnd
    what = weights, order, diloco, at, length
    path = parts.peers.broadcast_object('outer', lambda: _after(*what))
    if not path:
        print(f'Not all replicas have ended round {at // length}')
        state.phase = Phase.STOPPED
        raise FragmentEnd
    print(f'Round {there.round_ended + 1} begins with {path}')
    saved = saved.load()
    try:
        found, metrics = outer.with_weights(saved, Path(path))
        state.round_from = outer.digest_of(Path(path))
        by = outer.made_by(Path(path))
    except Damaged as damage:
        weights.put_aside(Path(path), damage)
        raise
    if parts.place.rank == 0 and at:
        parts.channel.send(RoundKnown(time.time(), order.trainer, length, by))
    skipped = metrics.pop(outer.SKIPPED, 0.0)
    if skipped and ends:
        metrics[outer.SKIPPED] = skipped
    state.metrics.update(metrics)
    return found


def _after(
    weights: outer.OuterWeights,
    order: FragmentOrder,
    diloco: spec.DiLoCo,
    samples: int,
    length: int,
) -> str:
    """Where the weights are, made if need be; '' if replicas lack, FreeTrainError if gone."""
    root, name = _training(order)
    stores = [
        PosixCheckpointStore(spec.replica_folder(root, k), spec.replica_name(name, k))
        for k in range(diloco.replicas)
    ]
    begun = samples - length
    for _ in range(_TRIES):
        if found := weights.find(samples):
            return str(found)
        try:
            if (ends := _ends(order, stores, samples)) is None:
                return ''
            if diloco.overlap and begun > 0 and weights.find(begun) is None:
                _after(weights, order, diloco, begun, length)  # nobody has begun a round
            if len(ends) == len(stores):
                how = diloco.outer, length, diloco.begins_with(begun, length), diloco.compress
                weights.step(ends, samples, *how)
        except EndDamaged as damaged:
            (store,) = [one for one in stores if one.folder == damaged.path.parent]
            store.put_aside(damaged.path, str(damaged))
        except FreeTrainError:
            if weights.find(samples) is None:
                raise  # else others have made them, and have gone on
    raise FreeTrainError(
        f'The weights after {samples} samples are not in {root / spec.OUTER}, and replicas have '
        'gone on, so that they cannot be made: put them back, or start anew in another folder.'
    )


def _ends(
    order: FragmentOrder, stores: Sequence[PosixCheckpointStore], samples: int
) -> Sequence[End] | None:
    """The ends of a round of the replicas that have not gone on. None: not all have come there."""
    transport = order.spec.diloco.transport if order.spec.diloco is not None else None
    if transport is None:
        newest = [store.newest() for store in stores]
        if not all(one is not None and one.samples >= samples for one in newest):
            return None
        return [end for store in stores if (end := end_of_round(store, samples))]
    told = {(replica, at): where for replica, at, where in order.handed_in}
    own = PosixCheckpointStore(Path(order.store), order.trainer).handed_in()  # perhaps not told yet
    told |= {(order.spec.replica, at): where for at, where in own.items()}
    if len({replica for replica, at in told if at >= samples}) < len(stores):
        return None
    return [EndElsewhere(transport, told[of]) for of in sorted(told) if of[1] == samples]


def weights_of(order: FragmentOrder) -> outer.OuterWeights:
    own = PosixCheckpointStore(Path(order.store), order.trainer)
    replica = order.spec.replica
    fence, exact = partial(own.check_fence, order.fragment), order.spec.mode
    return outer.OuterWeights(
        *_training(order), replica, fence, exact=isinstance(exact, Reproducible)
    )


def _training(order: FragmentOrder) -> tuple[Path, str]:
    return spec.training_of(order.store, order.trainer, order.spec.replica)
