"""What a replay found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WHERE_THEY_WENT = {
    'trained': 'trained', 'rescaling': 'lost to rescales', 'lost_to_preemption': 'lost to preemptions', 'too_short': 'about to go',
    'kept_free': 'kept free', 'no_use': 'no trainer could use them', 'not_worth': 'not worth a rescale',
    'stranded': 'idle beside a waiting trainer',
}
"""What became of idle node-seconds, and how a human is told so."""


@dataclass(frozen=True, eq=False)
class Series:
    """What happened, instant by instant; what is said of an instant holds until the next one.

    Attributes
    ----------
    times
        The instants at which something happened, in seconds of the trace's clock, the end of the window last.
    idle, used, running
        Idle nodes, those of them that train, and trainers that run.
    samples
        Trained in total until then, losses deducted.
    decision_s
        For how many seconds each decision was thought about, in order; there is none for the end.
    span_trainer, span_start, span_end, span_nodes
        Who ran from when to when on how many nodes: one entry for each fragment.
    """

    times: Floats
    idle: Ints
    used: Ints
    running: Ints
    samples: Floats
    decision_s: Floats
    span_trainer: tuple[str, ...]
    span_start: Floats
    span_end: Floats
    span_nodes: Ints

    @classmethod
    def of(cls, times: Sequence[float], idle: Sequence[int], used: Sequence[int], running: Sequence[int], samples: Sequence[float],
           decision_s: Sequence[float], spans: Sequence[tuple[str, float, float, int]]) -> Series:
        """From lists."""
        names, starts, ends, nodes = zip(*spans, strict=True) if spans else ((), (), (), ())
        return cls(np.array(times), np.array(idle, dtype=np.int64), np.array(used, dtype=np.int64), np.array(running, dtype=np.int64),
                   np.array(samples), np.array(decision_s), tuple(names), np.array(starts, dtype=np.float64),
                   np.array(ends, dtype=np.float64), np.array(nodes, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Outcome:
    """One run over one pool of nodes.

    Attributes
    ----------
    samples
        Trained, losses deducted.
    start_s, end_s
        The window, in seconds of the trace's clock.
    finished_s
        When the last trainer reached its total; None: not all did.
    idle_node_s, used_node_s
        Node-seconds that there were, and that fragments held.
    node_s
        Where all of them went: trained, rescaling, lost_to_preemption; and of those without a fragment, why: too_short, kept_free, no_use,
        not_worth, stranded, see :class:`~parsl_freetrain.replay.accounting.Idle`. They sum to ``idle_node_s``.
    preempted, rescaled
        How often a trainer lost nodes without notice, and how often it was changed otherwise.
    lost_preemption, lost_rescale
        Samples that this cost.
    trainers_done
        How many reached their total.
    samples_by_trainer, done_s
        By trainer; when, for those that are done.
    series
        What happened when.
    """

    samples: float
    start_s: float
    end_s: float
    finished_s: float | None
    idle_node_s: float
    used_node_s: float
    node_s: dict[str, float]
    preempted: int
    rescaled: int
    lost_preemption: float
    lost_rescale: float
    trainers_done: int
    samples_by_trainer: dict[str, float]
    done_s: dict[str, float]
    series: Series

    def time_to(self, samples: float) -> float:
        """After how many seconds so many samples had been trained, linear between instants; the whole window if never."""
        reached = np.maximum.accumulate(self.series.samples)
        i = int(np.searchsorted(reached, samples * (1 - 1e-12)))
        if i == 0:
            return 0.0
        if i == len(reached):
            return self.end_s - self.start_s
        times = self.series.times
        share = (samples - reached[i - 1]) / (reached[i] - reached[i - 1])
        return float(times[i - 1] + min(share, 1.0) * (times[i] - times[i - 1])) - self.start_s


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """A replay, and the same trainers on a constant pool.

    Attributes
    ----------
    trace, constant
        What became of the trainers on the trace, and on the constant pool.
    equivalent_nodes
        Mean number of idle nodes; the constant pool has the nearest whole number of them.
    efficiency
        U; None where the constant pool trained nothing.
    compared
        What U compares: 'samples' in the same time, or, where the trainers ran out on one of them, the 'time' for as many samples.
    work_efficiency
        The same ratio with the samples of each trainer divided by what one node of it trains per second, so that a mix of fast and
        slow networks adds like to like; None where U compares times.
    wall_s
        How long both took to compute, in seconds.
    """

    trace: Outcome
    constant: Outcome
    equivalent_nodes: float
    efficiency: float | None
    compared: str
    work_efficiency: float | None
    wall_s: float

    def as_json(self) -> dict[str, object]:
        """The document that ``freetrain replay --json`` writes; times in seconds, decisions in milliseconds."""
        run = self.trace
        thought = run.series.decision_s * 1000 if len(run.series.decision_s) else np.zeros(1)
        p50, p99, most = (float(np.percentile(thought, share)) for share in (50, 99, 100))
        return {
            'efficiency': self.efficiency, 'compared': self.compared, 'work_efficiency': self.work_efficiency,
            'samples': run.samples, 'static_samples': self.constant.samples,
            'equivalent_nodes': self.equivalent_nodes, 'idle_node_s': run.idle_node_s, 'used_node_s': run.used_node_s,
            'node_s': run.node_s, 'preempted': run.preempted, 'rescaled': run.rescaled,
            'lost_samples': {'preemption': run.lost_preemption, 'rescale': run.lost_rescale}, 'trainers_done': run.trainers_done,
            'events': len(run.series.decision_s),
            'decision_ms': {'p50': p50, 'p99': p99, 'max': most}, 'wall_s': self.wall_s,
        }
