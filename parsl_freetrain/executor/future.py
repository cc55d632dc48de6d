"""The future of a trainer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.executor.notebook import html_of

MOST_LOSSES = 400


@dataclass(frozen=True)
class Progress:
    """How far a trainer is.

    Attributes
    ----------
    samples, total_samples
        Trained so far, and in total; the total is None while only the number of epochs is known.
    nodes
        Nodes that its fragment holds now.
    fragments, preempted, rescaled
        How many fragments it had in this run, how many of them were preempted, and how often the node count changed.
    metrics
        The last values given to ``ctx.report``.
    """

    samples: int = 0
    total_samples: int | None = None
    nodes: int = 0
    fragments: int = 0
    preempted: int = 0
    rescaled: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class TrainingFuture(Future[Checkpoint]):
    """The final :class:`~parsl_freetrain.core.words.Checkpoint` of a trainer.

    It can be an argument of any Parsl app. Made by calling a ``@freetrain_app``.

    Attributes
    ----------
    name : str
        The trainer's name.
    state : str
        'waiting' (for its arguments), 'queued' (no nodes now), 'running', 'finished', 'failed' or 'cancelled'.
    checkpoint : Checkpoint or None
        The newest committed checkpoint.
    checkpoints : list of Future
        The checkpoint future (Parsl's AppFuture) of each fragment so far.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state = 'waiting'
        self.checkpoint: Checkpoint | None = None
        self.checkpoints: list[Future[Checkpoint]] = []
        self._progress = Progress()
        self._losses: list[tuple[int, float]] = []
        self._on_cancel: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def progress(self) -> Progress:
        """A snapshot of how far the training is."""
        return self._progress

    def _progressed(self, samples: int, metrics: Mapping[str, float]) -> None:
        """Keep the loss for the picture; of many values every other one goes."""
        loss = metrics.get('loss')
        if loss is not None and math.isfinite(loss):
            self._losses.append((samples, loss))
            if len(self._losses) > MOST_LOSSES:
                self._losses = self._losses[::2]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_of(self.name, self.state, self._progress.samples, self._progress.total_samples, self._progress.nodes,
                       self._progress.metrics, tuple(self._losses))

    def running(self) -> bool:
        return self.state == 'running'

    def cancel(self) -> bool:
        """Stop the training with a checkpoint; the future is cancelled once its nodes are free.

        Returns
        -------
        bool
            False if the training is over already.
        """
        with self._lock:
            if self.done():
                return False
            on_cancel = self._on_cancel
        if on_cancel is None:
            self._settle_cancelled()
        else:
            on_cancel()
        return True

    def _settle_cancelled(self) -> None:
        self.state = 'cancelled'
        if super().cancel():
            self.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        progress = self._progress
        return f'<TrainingFuture {self.name!r} {self.state}, {progress.samples} of {progress.total_samples or "?"} samples>'
