"""The results of a replay."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WHERE_THEY_WENT = {
    'trained': 'trained',
    'rescaling': 'lost to rescales',
    'lost_to_preemption': 'lost to preemptions',
    'too_short': 'about to go',
    'kept_free': 'kept free',
    'no_use': 'no trainer could use them',
    'not_worth': 'not worth a rescale',
    'stranded': 'idle beside a waiting trainer',
}
"""The uses of idle node-seconds, with their labels."""


@dataclass(frozen=True, eq=False)
class Series:
    #: Instants of changes, in seconds of the trace's clock; the last one is the window's end.
    times: Floats
    #: With ``used``, ``running``: numbers of idle nodes, of those that train, of running trainers.
    idle: Ints
    used: Ints
    running: Ints
    samples: Floats  #: samples trained until then, minus losses
    #: Duration of each decision in seconds; there is none for the end of the window.
    decision_s: Floats
    #: With ``span_start``, ``span_end``, ``span_nodes``: each fragment's trainer, times and nodes.
    span_trainer: tuple[str, ...]
    span_start: Floats
    span_end: Floats
    span_nodes: Ints

    @classmethod
    def of(
        cls,
        instants: Sequence[tuple[float, int, int, int, float]],
        decision_s: Sequence[float],
        spans: Sequence[tuple[str, float, float, int]],
    ) -> 'Series':
        """From rows: (time, idle, used, running, samples) and (trainer, start, end, nodes)."""
        times, idle, used, running, samples = np.array(instants, dtype=np.float64).T
        names, *span = zip(*spans, strict=True) if spans else ((), (), (), ())
        starts, ends, nodes = (np.array(column, dtype=np.float64) for column in span)
        counts = idle.astype(np.int64), used.astype(np.int64), running.astype(np.int64)
        took, ran = np.array(decision_s), nodes.astype(np.int64)
        return cls(times, *counts, samples, took, tuple(names), starts, ends, ran)


@dataclass(eq=False)
class PoolResult:
    start_s: float  #: of the window, by the trace's clock
    end_s: float = 0.0
    samples: float = 0.0  #: trained, minus losses
    finished_s: float | None = None  #: the last total was reached; None: not all were
    idle_node_s: float = 0.0  #: node-seconds available
    used_node_s: float = 0.0  #: held by fragments
    #: all of them by use: trained, rescaling, lost_to_preemption, or a cause of Idle
    node_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHERE_THEY_WENT, 0.0))
    preempted: int = 0  #: losses of nodes without notice
    rescaled: int = 0  #: other changes
    lost_preemption: float = 0.0  #: samples
    lost_rescale: float = 0.0
    samples_by_trainer: dict[str, float] = field(default_factory=dict)
    done_s: dict[str, float] = field(default_factory=dict)  #: when each trainer finished
    series: Series = field(init=False)

    def time_to(self, samples: float) -> float:
        """Seconds until so many samples were trained, linear between instants, or the window."""
        reached = np.maximum.accumulate(self.series.samples)
        i = int(np.searchsorted(reached, samples * (1 - 1e-12)))
        if i == 0:
            return 0.0
        if i == len(reached):
            return self.end_s - self.start_s
        times = self.series.times
        share = (samples - reached[i - 1]) / (reached[i] - reached[i - 1])
        return float(times[i - 1] + min(share, 1.0) * (times[i] - times[i - 1])) - self.start_s


@dataclass(frozen=True)
class Oracle:
    """The same replay with known scaling curves. Normalised work: node-seconds on one node."""

    samples: float
    work: float
    learned_work: float  # of the replay that learned the curves


@dataclass(frozen=True, eq=False)
class ReplayResult:
    trace: PoolResult  #: with ``constant``: PoolResult on the trace, and on the constant pool
    constant: PoolResult
    #: Mean number of idle nodes; the constant pool has the nearest whole number of nodes.
    equivalent_nodes: float
    efficiency: float | None  #: U; None if the constant pool trained nothing
    #: 'samples' in the same time, or the 'time' for the same, if all finished on one of them.
    compared: str
    #: The same, each trainer's samples by its speed on one node; None if U compares times.
    work_efficiency: float | None
    wall_s: float  #: computing time of both, in seconds
    #: For learned curves, the comparison with known ones; None: the curves were known.
    oracle: Oracle | None = None
    #: No decisions have a higher U, see bound.most_samples; None if U compares times.
    efficiency_bound: float | None = None

    def as_json(self) -> dict[str, object]:
        """The document of ``freetrain replay --json``: seconds, and milliseconds for decisions."""
        run = self.trace
        thought = run.series.decision_s * 1000 if len(run.series.decision_s) else np.zeros(1)
        p50, p99, most = (float(np.percentile(thought, share)) for share in (50, 99, 100))
        return {
            'efficiency': self.efficiency,
            'efficiency_bound': self.efficiency_bound,
            'compared': self.compared,
            'work_efficiency': self.work_efficiency,
            'samples': run.samples,
            'static_samples': self.constant.samples,
            'equivalent_nodes': self.equivalent_nodes,
            'idle_node_s': run.idle_node_s,
            'used_node_s': run.used_node_s,
            'node_s': run.node_s,
            'preempted': run.preempted,
            'rescaled': run.rescaled,
            'lost_samples': {'preemption': run.lost_preemption, 'rescale': run.lost_rescale},
            'trainers_done': len(run.done_s),
            'events': len(run.series.decision_s),
            'decision_ms': {'p50': p50, 'p99': p99, 'max': most},
            'wall_s': self.wall_s,
            **self._against_the_oracle(),
        }

    def _against_the_oracle(self) -> dict[str, object]:
        known = self.oracle
        if known is None:
            return {}
        ratio = known.learned_work / known.work if known.work > 0 else None
        return {'oracle_samples': known.samples, 'oracle_work': known.work, 'work_ratio': ratio}
