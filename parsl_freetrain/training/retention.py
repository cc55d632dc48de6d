"""Which checkpoints of a trainer are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import Checkpoint


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a newer one has been written and verified; one that any of the rules keeps stays.

    Attributes
    ----------
    last
        How many of the newest; at least 1.
    every
        The last checkpoint of each fragment whose number is a multiple of this; None: of none.
    best
        Name of a metric given to ``ctx.report``: the checkpoint where it was best (of equal ones the newest) stays; None: not looked at.
    mode
        Whether 'min' or 'max' is the best; a metric that is not a number never is.

    Raises
    ------
    BadInput
        If one of these is not as described.
    """

    last: int = 3
    every: int | None = None
    best: str | None = None
    mode: str = 'min'

    def __post_init__(self) -> None:
        for what, value in (('last', self.last), ('every', self.every)):
            if value is not None and value < 1:
                raise BadInput(f'Retention: {what} is {value}; it must be at least 1.')
        if self.mode not in ('min', 'max'):
            raise BadInput(f"Retention: mode is {self.mode!r}; it must be 'min' or 'max'.")

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[str]:
        """The paths of those that stay; ``checkpoints`` are ordered from the oldest to the newest."""
        kept = {checkpoint.path for checkpoint in checkpoints[-self.last:]}
        if self.every is not None:
            last_of = {checkpoint.fragment: checkpoint.path for checkpoint in checkpoints}
            kept |= {path for fragment, path in last_of.items() if fragment % self.every == 0}
        if self.best is not None:
            sign = 1 if self.mode == 'max' else -1
            measured = [(sign * checkpoint.metrics[self.best], i, checkpoint.path) for i, checkpoint in enumerate(checkpoints)
                        if not math.isnan(checkpoint.metrics.get(self.best, math.nan))]
            kept |= {max(measured)[2]} if measured else set()
        return kept
