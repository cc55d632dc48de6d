"""The user's metrics: the mean over a global batch of what all ranks report in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from parsl_freetrain.training.comm.peers import Peers, gather_bytes

_Parts = dict[str, tuple[int, list[tuple[float, float]]]]
"""By metric: samples at the end of a global batch, and its parts as (weight, value)."""


class Reports:
    """What was given to ``ctx.report``.

    A value that is reported in the body of the loop is one of a part of a global batch: a virtual
    shard, or a rank's samples. Its mean over the parts, weighted by their samples, is exact, so it
    does not depend on how they are divided among ranks. ``values``: the last known metrics; it is
    kept up to date.
    """

    def __init__(self, values: dict[str, float]) -> None:
        self.values = values
        self._reached = 0
        self._parts: _Parts = {}
        self._micro_batch: dict[str, float] | None = None

    def put(self, name: str, value: float) -> None:
        """Report a value; in a micro-batch, the last value of each name counts."""
        if self._micro_batch is not None:
            self._micro_batch[name] = value
        else:
            self.values[name] = value
            self._parts.pop(name, None)

    def put_all(self, metrics: Mapping[str, Any]) -> None:
        """Report what ``ctx.report`` was given. Raises TypeError if a value is not a number."""
        for name, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                self.put(name, float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise TypeError(
                    f'ctx.report was given {name}={value!r}, a {type(value).__name__}; '
                    'it takes numbers, as of float.'
                ) from None

    @property
    def in_micro_batch(self) -> bool:
        """Whether the body of the loop is running."""
        return self._micro_batch is not None

    def begin_micro_batch(self, reached: int) -> None:
        """Call before a micro-batch; ``reached``: samples at the end of its global batch."""
        self._reached, self._micro_batch = reached, {}

    def end_micro_batch(self, weight: float) -> None:
        """Call after a micro-batch; ``weight``: its share of the samples of the global batch."""
        micro_batch, self._micro_batch = self._micro_batch or {}, None
        for name, value in micro_batch.items():
            if weight:
                at, parts = self._parts.get(name, (0, []))
                if at != self._reached:
                    self._parts[name] = self._reached, parts = self._reached, []
                parts.append((weight, value))

    def gather(self, peers: Peers) -> None:
        """Set the values to the means over the last global batch in which each was reported. All
        ranks call this.
        """
        said = gather_bytes(peers, msgspec.msgpack.encode(self._parts) if self._parts else b'')
        for packed in (one for rank, one in enumerate(said) if rank != peers.rank and one):
            for name, (at, parts) in msgspec.msgpack.decode(packed, type=_Parts).items():
                newest, known = self._parts.get(name, (0, []))
                if at > newest:
                    self._parts[name] = at, list(parts)
                elif at == newest:
                    known.extend(parts)
        for name, (_, parts) in self._parts.items():
            self.values[name] = mean(parts)
        self._parts = {}

    def forget(self) -> None:
        """Forget what was reported and not gathered, since training goes back."""
        self._parts, self._micro_batch = {}, None


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
