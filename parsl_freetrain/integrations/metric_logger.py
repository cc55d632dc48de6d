"""What a logger of metrics is to an executor: it runs in the submitting process, so that nodes need
neither the library nor its credentials.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LoggedTraining:
    """A training from 0 samples on, through all fragments and all runs of the workflow.

    Attributes
    ----------
    id
        The same in all runs that go on with it, and no other one's: letters, digits, '-', '_', '.'.
    trainer
        The name of the trainer.
    settings
        Plain values: its node counts, mode and total.
    samples
        Everything up to here has been logged already; -1: nothing.
    """

    id: str
    trainer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: int = -1


class OpenLog(Protocol):
    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        """Log metrics at a number of samples, which increases; ``at`` in epoch seconds."""

    def close(self, state: str) -> None:
        """No more metrics in this run; ``state``: the trainer's, such as 'finished'."""


class MetricLogger(Protocol):
    """A library that keeps metrics. Errors are repeated as warnings, and tried again."""

    def open(self, training: LoggedTraining) -> OpenLog:
        """Begin a training, or go on with one that another process has begun."""
