"""Compares two runs of the same mix: jobs that started later, and the use of idle time."""

from dataclasses import dataclass
from itertools import combinations

from tests.slurm.experiment import Outcome


def later_s(one: Outcome, other: Outcome) -> list[float]:
    """How much later each ordinary job started in ``other``, in seconds; negative: earlier."""
    return [b.start_s - a.start_s for a, b in zip(one.ordinary, other.ordinary, strict=True)]


def scatter_s(*alone: Outcome) -> float:
    """The largest difference between starts of one job without FreeTrain, in seconds."""
    return max(max(map(abs, later_s(one, other))) for one, other in combinations(alone, 2))


def delays_s(alone: list[Outcome], filled: Outcome) -> list[float]:
    """How much later each job started than in the later run without FreeTrain, in seconds."""
    return [min(each) for each in zip(*(later_s(one, filled) for one in alone), strict=True)]


LONG_S = 60.0


@dataclass(frozen=True)
class Idle:
    """Node-seconds that jobs and reservations left idle, and what became of them. The first parts
    add up to ``idle``: ``outside`` was in no block, ``other`` in a block without a fragment.
    ``long``: idle for more than :data:`LONG_S` seconds, ``in_long`` what fragments had of it.
    """

    idle: float
    trained: float
    checkpointing: float
    lost: float
    other: float
    outside: float
    long: float
    in_long: float

    @property
    def share(self) -> float:
        """What was turned into training."""
        return self.trained / self.idle

    @property
    def share_of_long(self) -> float:
        """The same of long times, checkpoints included; 1 if there were none."""
        return self.in_long / self.long if self.long else 1.0


def idle_of(outcome: Outcome) -> Idle:
    """What became of the idle node-seconds of a run."""
    end = max(job.end_s for job in outcome.ordinary)
    names = [f'node{number:02d}' for number in range(1, outcome.nodes + 1)]
    gaps = {name: _gaps(outcome, name, end) for name in names}
    idle = sum(stop - start for each in gaps.values() for start, stop in each)
    blocks = sum(
        len(b.names) * max(0.0, min(b.end_s, end) - max(b.start_s, 0.0)) for b in outcome.blocks
    )
    spent = outcome.node_s or {}
    fragments = sum(max(0.0, min(ended, end) - max(b, 0.0)) for _, b, ended in outcome.trained)
    checkpointing, lost = spent.get('checkpointing', 0.0), spent.get('lost', 0.0)
    long = [
        (name, start, stop)
        for name, each in gaps.items()
        for start, stop in each
        if stop - start > LONG_S
    ]
    return Idle(
        idle,
        fragments - checkpointing - lost,
        checkpointing,
        lost,
        blocks - fragments,
        idle - blocks,
        sum(stop - start for _, start, stop in long),
        sum(
            max(0.0, min(ended, stop) - max(begun, start))
            for name, start, stop in long
            for node, begun, ended in outcome.trained
            if node == name
        ),
    )


def _gaps(outcome: Outcome, name: str, end: float) -> list[tuple[float, float]]:
    """When a node had no ordinary job, and was not set aside."""
    gaps, at = [], 0.0
    busy = [ran for ran in (*outcome.ordinary, *outcome.reserved) if name in ran.names]
    for start, stop in sorted((ran.start_s, ran.end_s) for ran in busy):
        if min(start, end) > at:
            gaps.append((at, min(start, end)))
        at = max(at, stop)
    return [*gaps, (at, end)] if at < end else gaps
