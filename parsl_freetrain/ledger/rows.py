"""What a ledger tells, as frozen rows; times in epoch seconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parsl_freetrain.core.controller.settings import DecisionSettings
from parsl_freetrain.core.model.events import Event

FINAL_STATES = frozenset({'finished', 'failed', 'cancelled'})
"""States that a trainer does not leave within a run."""


@dataclass(frozen=True)
class RunRow:
    """One run; ``last_at`` is the last time that it noted anything. Times in epoch seconds, as
    everywhere here.
    """

    id: int
    name: str
    begun_at: float
    ended_at: float | None
    how: str | None
    last_at: float
    parsl_run_dir: str = ''
    command: str = ''
    settings: DecisionSettings | None = None


@dataclass(frozen=True)
class TrainerRow:
    """A trainer within one run; ``samples`` is the last checkpoint's, ``first_samples`` what it was
    resumed with.
    """

    run: int
    name: str
    submitted_at: float
    spec: dict[str, Any]
    total_samples: int | None
    first_samples: int
    samples: int
    state: str
    state_at: float
    why: str = ''


@dataclass(frozen=True)
class BlockRow:
    """A block; ``until`` is its expected end, None if unknown."""

    run: int
    block: str
    opened_at: float
    job_id: str | None = None
    nodes: int = 1
    walltime_s: float | None = None
    until: float | None = None
    names: tuple[str, ...] = ()
    node_class: str = ''
    closed_at: float | None = None
    how: str | None = None


@dataclass(frozen=True)
class NodeRow:
    """A node's stay in one block; ``node`` is unique within the run, ``name`` is the machine's."""

    run: int
    node: str
    block: str
    name: str
    joined_at: float
    left_at: float | None = None
    how: str | None = None


@dataclass(frozen=True)
class FragmentRow:
    """A fragment; ``samples`` (what the next one can go on from) and ``reached`` are None until it
    has ended.
    """

    run: int
    trainer: str
    fragment: int
    decided_at: float
    task_id: int | None = None
    nodes: tuple[str, ...] = ()
    deadline: float | None = None
    from_samples: int = 0
    started_at: float | None = None
    started_samples: int | None = None
    seen_at: float | None = None
    seen_samples: int | None = None
    rate: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    ended_at: float | None = None
    ending: str | None = None
    samples: int | None = None
    reached: int | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """What identifies it in a ledger: run, trainer, number."""
        return self.run, self.trainer, self.fragment


@dataclass(frozen=True)
class CheckpointRow:
    """A committed checkpoint.

    Attributes
    ----------
    at
        When it was committed.
    seconds
        How long writing it took.
    pause_s
        For how long training stood still for it, in seconds: copying the state, where it was
        written beside training, else collecting and writing it.
    """

    run: int
    trainer: str
    fragment: int
    at: float
    samples: int
    path: str = ''
    seconds: float = 0.0
    pause_s: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def pause(self) -> tuple[float, float]:
        """When training stood still for it: at the end of writing if it had to wait for that, else
        before.
        """
        until = self.at if self.pause_s >= self.seconds else self.at - self.seconds
        return until - self.pause_s, until


@dataclass(frozen=True)
class Offer:
    """A node that the site offers from ``start`` until ``end`` (None: unknown)."""

    run: int
    name: str
    start: float
    end: float | None


@dataclass(frozen=True)
class ProgressRow:
    """One report of a running fragment; ``rate`` in samples per second."""

    run: int
    trainer: str
    fragment: int
    at: float
    samples: int
    rate: float | None
    metrics: dict[str, Any]

    @property
    def key(self) -> tuple[int, str, int]:
        """That of its fragment."""
        return self.run, self.trainer, self.fragment


@dataclass(frozen=True)
class Batch:
    """Events that the controller was given in one call; ``seq`` counts from 1 within the run."""

    seq: int
    at: float
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RunHistory:
    """A consistent copy of what a ledger says, progress reports, events and decisions apart.

    ``latest`` is the newest run of the ledger (whether or not it is among ``runs``): the only one
    that may be alive.
    """

    runs: tuple[RunRow, ...] = ()
    trainers: tuple[TrainerRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    fragments: tuple[FragmentRow, ...] = ()
    checkpoints: tuple[CheckpointRow, ...] = ()
    offers: tuple[Offer, ...] = ()
    latest: int | None = None

    def alive(self, run: RunRow) -> bool:
        """Whether the run may still go on: nobody ended it and no other has begun since."""
        return run.ended_at is None and run.id == self.latest

    def until(self, run: RunRow, now: float | None = None) -> float:
        """When the account of the run ends: at its end, ``now`` if it is alive, else at its last
        entry.
        """
        if run.ended_at is not None:
            return max(run.begun_at, run.ended_at)
        return max(run.last_at, now) if now is not None and self.alive(run) else run.last_at
