"""Compares two runs of the same mix: jobs that started later, and the use of idle time."""

from __future__ import annotations

from dataclasses import dataclass

from tests.slurm.experiment import Outcome


def later_s(one: Outcome, other: Outcome) -> list[float]:
    """How much later each ordinary job started in ``other``, in seconds; negative: earlier."""
    return [b.start_s - a.start_s for a, b in zip(one.ordinary, other.ordinary, strict=True)]


def scatter_s(one: Outcome, other: Outcome) -> float:
    """The largest difference of two runs without FreeTrain, in seconds: what the scheduler does by
    itself.
    """
    return max(map(abs, later_s(one, other)))


def delays_s(alone: list[Outcome], filled: Outcome) -> list[float]:
    """How much later each ordinary job started with FreeTrain than in the later of the runs
    without, in seconds.
    """
    return [min(each) for each in zip(*(later_s(one, filled) for one in alone), strict=True)]


@dataclass(frozen=True)
class Idle:
    """Node-seconds that ordinary jobs left idle between the first submission and the end of the
    last of them, and what became of them.

    The parts add up to ``idle``: ``outside`` was in no block (the hole was too short, the block was
    waiting, minutes were rounded down), ``other`` was in a block without a fragment: its start and
    its end, Slurm's own included.
    """

    idle: float
    trained: float
    checkpointing: float
    lost: float
    other: float
    outside: float

    @property
    def share(self) -> float:
        """What was turned into training."""
        return self.trained / self.idle


def idle_of(outcome: Outcome) -> Idle:
    end = max(job.end_s for job in outcome.ordinary)
    idle = outcome.nodes * end - sum(
        len(job.names) * (job.end_s - job.start_s) for job in outcome.ordinary
    )
    blocks = sum(
        len(b.names) * max(0.0, min(b.end_s, end) - max(b.start_s, 0.0)) for b in outcome.blocks
    )
    spent = outcome.node_s or {}
    fragments = sum(
        max(0.0, min(ended, end) - max(begun, 0.0)) for _, begun, ended in outcome.trained
    )
    checkpointing, lost = spent.get('checkpointing', 0.0), spent.get('lost', 0.0)
    return Idle(
        idle,
        fragments - checkpointing - lost,
        checkpointing,
        lost,
        blocks - fragments,
        idle - blocks,
    )
