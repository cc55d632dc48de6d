"""What ranks know of a global batch without asking a device, and tell each other on the CPU."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from parsl_freetrain.training.comm.peers import Peers, gather

_EACH, _HEAD = 32, 128  # bytes at most of a scheduler's step, and of what there is once


class Notes(msgspec.Struct, array_like=True):
    #: wish, settings: what the rank wants to happen next; a digest of its optimizers' settings.
    wish: int
    settings: bytes
    #: present, stepped: which parameters have a gradient; how each optimizer was stepped.
    present: bytes
    stepped: bytes
    #: By call of a scheduler's ``step``: the shard, the scheduler, and the value or None.
    scheduled: list[tuple[int, int, float | None]]
    integers: list[int]  #: the integer buffers that have changed in the rank's first shard
    numbers: bool = False  #: whether numbers of the body have


def exchange(peers: Peers, own: Notes, shards: int, schedulers: int, integers: int) -> list[Notes]:
    """The notes of all ranks; each has ``shards`` shards at most."""
    if peers.world_size == 1:
        return [own]
    most = len(own.present) + len(own.stepped) + _EACH * shards * schedulers + 5 * integers + _HEAD
    return gather(peers, own, Notes, most)


def most(flags: Iterable[bytes]) -> bytes:
    """The largest of each."""
    return bytes(map(max, zip(*flags, strict=True)))


def scheduled_in(
    notes: Sequence[Notes], schedulers: int, sizes: Sequence[int]
) -> list[tuple[float | None, ...]]:
    """Per scheduler () not stepped, (value,) the mean over samples, or (None,)."""
    found: list[tuple[float | None, ...]] = []
    for number in range(schedulers):
        calls = [(shard, v) for one in notes for shard, i, v in one.scheduled if i == number]
        values = [(float(sizes[shard]), v) for shard, v in calls if v is not None and sizes[shard]]
        found.append(() if not calls else (mean(values) if values else None,))
    return found


def mean(parts: Sequence[tuple[float, float]]) -> float:
    """The mean of (weight, value) pairs, rounded once, whatever their order."""
    first = parts[0][1]
    if all(value == first for _, value in parts):
        return first
    try:
        total = math.fsum(weight * value for weight, value in parts)
    except (OverflowError, ValueError):  # infinities of both signs
        return math.nan
    return total / math.fsum(weight for weight, _ in parts)
