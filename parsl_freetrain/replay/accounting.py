"""The accounts of a replay, by the published replayer's rules: progress is rate x time; a change of
nodes costs the samples of ``rescale_up_s`` or ``rescale_down_s`` seconds at the rate before it; a
loss costs ``rescale_down_s`` seconds so, at most once for each trainer and instant.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.replay.result import PoolResult, Series


class Interruption(StrEnum):
    STOPPED = 'stopped'  # for a rescale
    EXPIRED = 'expired'  # its nodes left when they were expected to
    PREEMPTED = 'preempted'  # its nodes left without notice


@dataclass
class RecordedJob:
    trainer: Trainer
    submit_s: float
    wanted: int
    samples: float = 0.0  # until since, minus losses, which may be more
    rate: float = 0.0  # in samples per second, from since on
    since: float = 0.0
    nodes: int = 0
    fragment: int = 0
    deadline_s: float | None = None
    started_s: float = 0.0
    done_s: float | None = None
    version: int = 0  # increased with every change of these: a completion predicted before is void

    @property
    def total(self) -> int:
        total = self.trainer.total_samples
        assert total is not None
        return total

    def advance(self, at: float) -> None:
        self.samples += self.rate * (at - self.since)
        self.since = at

    def completion_s(self) -> float:
        return self.since + (self.total - self.samples) / self.rate


@dataclass
class Idle:
    """Numbers of idle nodes that train nothing, by cause."""

    too_short: int = 0  # they leave within min_hole_s
    kept_free: int = 0  # as the settings say
    no_use: int = 0  # each trainer has all that it can use, or waits for more than are free
    not_worth: int = 0  # the rescale would cost more than it gains within the horizon
    stranded: int = 0  # a waiting trainer could have started: should be none


@dataclass(eq=False)
class Accounts(PoolResult):
    """All accounts from ``start_s`` to ``end_s``, the instant that was closed last."""

    idle: int = 0
    used: int = 0
    running: int = 0
    unused: Idle = field(default_factory=Idle)
    rate: float = 0.0
    decision_s: list[float] = field(default_factory=list)
    _instants: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    _spans: list[tuple[str, float, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.end_s = self.start_s

    def advance(self, at: float) -> None:
        """Account for the time from the last instant to ``at``, in which nothing changes."""
        passed = at - self.end_s
        self.idle_node_s += self.idle * passed
        self.used_node_s += self.used * passed
        self.node_s['trained'] += self.used * passed
        for why, nodes in vars(self.unused).items():
            if nodes:
                self.node_s[why] += nodes * passed
        self.samples += self.rate * passed
        self.end_s = at

    def train(self, run: RecordedJob, nodes: int, rate: float) -> None:
        """Set the node count and rate of a trainer from now on; 0: no nodes."""
        if run.nodes and run.started_s < self.end_s:
            self._spans.append((run.trainer.name, run.started_s, self.end_s, run.nodes))
        self.used += nodes - run.nodes
        self.running += (nodes > 0) - (run.nodes > 0)
        self.rate += rate - run.rate
        if not self.running:
            self.rate = 0.0  # remove the rounding error of the sum
        run.advance(self.end_s)
        run.nodes, run.rate, run.started_s = nodes, rate, self.end_s
        run.version += 1

    def charge(self, run: RecordedJob, before: tuple[int, float], cause: Interruption) -> None:
        """Charge an interrupted trainer: it had ``before`` (nodes, rate), and goes on as now."""
        nodes, rate = before
        # The same number means other nodes.
        grows = cause is Interruption.STOPPED and run.nodes >= nodes
        seconds = run.trainer.rescale_up_s if grows else run.trainer.rescale_down_s
        lost = seconds * rate
        run.samples -= lost
        run.version += 1
        self.samples -= lost
        self.node_s['trained'] -= seconds * nodes
        if cause is Interruption.PREEMPTED:
            self.preempted += 1
            self.lost_preemption += lost
            self.node_s['lost_to_preemption'] += seconds * nodes
        else:
            self.rescaled += 1
            self.lost_rescale += lost
            self.node_s['rescaling'] += seconds * nodes

    def close_instant(self, idle: int, unused: Idle, decision_s: float | None) -> None:
        self.idle, self.unused = idle, unused
        if decision_s is not None:
            self.decision_s.append(decision_s)
        self._instants.append((self.end_s, idle, self.used, self.running, self.samples))

    def outcome(self, runs: dict[str, RecordedJob]) -> PoolResult:
        for run in runs.values():
            self.train(run, 0, 0.0)
        self.close_instant(self.idle, self.unused, None)
        self.samples = sum(run.samples for run in runs.values())
        self.samples_by_trainer = {name: run.samples for name, run in runs.items()}
        self.done_s = {name: run.done_s for name, run in runs.items() if run.done_s is not None}
        self.finished_s = max(self.done_s.values()) if len(self.done_s) == len(runs) else None
        self.series = Series.of(self._instants, self.decision_s, self._spans)
        for rows in (self._instants, self.decision_s, self._spans):
            rows.clear()
        return self
