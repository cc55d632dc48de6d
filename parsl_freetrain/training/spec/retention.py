"""Which checkpoints of a trainer are kept."""

import math
from collections.abc import Sequence
from typing import Literal

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import AtLeast1, PositiveSeconds
from parsl_freetrain.core.model.types import Checkpoint

BEST = 'best'  # the metric that ``ctx.checkpoint`` reports
Resume = Literal['auto', 'require', 'never']


class Retention(Settings, frozen=True, kw_only=False):
    """Rules for keeping checkpoints, applied after a newer one has been written and verified. A
    checkpoint is kept if any rule says so.

    Attributes
    ----------
    last
        Number of newest checkpoints to keep; at least 1.
    every
        Keep the last checkpoint of each fragment whose number is a multiple of this; None: none.
    best
        Name of a metric given to ``ctx.report``. The checkpoint with its best value is kept (the
        newest of equal ones). Default: the value given to ``ctx.checkpoint``.
    mode
        Whether the best value is the 'min' or the 'max'. NaN is never the best.
    """

    last: AtLeast1 = 3
    every: AtLeast1 | None = None
    best: str | None = None
    mode: Literal['min', 'max'] = 'min'

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[str]:
        """The paths to keep; ``checkpoints`` are ordered from the oldest to the newest."""
        kept = {checkpoint.path for checkpoint in checkpoints[-self.last :]}
        if self.every is not None:
            last_of = {checkpoint.fragment: checkpoint.path for checkpoint in checkpoints}
            kept |= {path for fragment, path in last_of.items() if fragment % self.every == 0}
        best = self.best_of(checkpoints)
        return kept | ({best.path} if best is not None else set())

    def best_of(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        name, sign = self.best or BEST, 1 if self.mode == 'max' else -1
        measured = [
            (sign * checkpoint.metrics[name], i)
            for i, checkpoint in enumerate(checkpoints)
            if not math.isnan(checkpoint.metrics.get(name, math.nan))
        ]
        return checkpoints[max(measured)[1]] if measured else None


class Checkpoints(Settings, frozen=True, kw_only=True):
    """When a trainer writes checkpoints, and which of them are kept and used.

    Attributes
    ----------
    every_s
        Seconds between checkpoints within a fragment. A lost node costs at most this much training.
    keep
        Number of newest checkpoints to keep; or a :class:`Retention`, which can also keep those of
        every nth fragment and the best.
    resume
        What to do with checkpoints of an earlier run: 'auto' (use them if there are any), 'require'
        (fail without them) or 'never' (move them aside). Default: the executor's setting.
    """

    every_s: PositiveSeconds = 30.0
    keep: AtLeast1 | Retention = 3
    resume: Resume | None = None

    @property
    def retention(self) -> Retention:
        return Retention(self.keep) if isinstance(self.keep, int) else self.keep
