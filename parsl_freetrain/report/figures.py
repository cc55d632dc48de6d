"""All figures of a report, from the state of runs."""

from collections import Counter
from dataclasses import asdict, astuple, dataclass
from statistics import median_high
from typing import Any

from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.model.state import History
from parsl_freetrain.report import learned
from parsl_freetrain.report.metrics import losses, metric_curves
from parsl_freetrain.report.outcome import outcomes
from parsl_freetrain.report.status import snapshot, state_of
from parsl_freetrain.report.summary import RunEfficiency, efficiency, summary
from parsl_freetrain.report.timeline import Clock, causes


@dataclass(frozen=True)
class Decisions:
    count: int
    by_status: dict[str, int]
    median_s: float
    longest_s: float


class Figures:
    """The contents of the report on some runs; U needs an exact allocator (None: without U)."""

    def __init__(self, history: History, now: float, allocator: Allocator | None) -> None:
        self.history, self.now, self.clock = history, now, Clock(history, now)
        name = history.runs[-1].name
        many = f'{len(history.runs)} runs, one continuing the other'
        self.title = f'run {name}' if len(history.runs) == 1 else many
        trainers = list(dict.fromkeys(name for run in history.runs for name in run.trainers))
        self.trainers = ', '.join([*trainers[:3], *['…'][: len(trainers) > 3]]) or 'no trainer'
        self.summary = summary(history, now)
        no_gain = RunEfficiency({}, None)
        self.efficiency = efficiency(history, now, allocator) if allocator else no_gain
        self.causes = causes(history, now)
        decided = [one for run in history.runs for one in run.decisions]
        took = [one.seconds for one in decided]
        by_status = dict(Counter(one.status for one in decided))
        times = median_high(took) if took else 0.0, max(took, default=0.0)
        self.decisions = Decisions(len(decided), by_status, *times)
        self.losses = losses(history, self.clock)
        self.metrics = metric_curves(history, self.clock)
        self.scalings = learned.scalings(history)
        self.rescales = learned.rescale_costs(history)
        #: Of decisions that changed a trainer's node count.
        self.outcomes = tuple(outcomes(history, now))
        self.shapes = learned.shapes_tried(history.fragments)
        failed = [f.ended for f in history.fragments if f.ended and f.ended.ending == 'failed']
        #: (trainer, fragment, error) of failed fragments, newest first.
        self.errors = tuple((e.trainer, e.fragment, e.error) for e in reversed(failed) if e.error)
        self.status = snapshot(history, now, named=name)  #: the newest of the runs at this time
        every = ((run, one) for run in history.runs for one in run.trainers.values())
        self.states = {one.name: state_of(one, history.alive(run)) for run, one in every}


def as_document(found: Figures) -> dict[str, Any]:
    begun = {r.id: r.began.at for r in found.history.runs}
    names = {r.id: r.name for r in found.history.runs}
    return {
        'runs': list(names.values()),
        'summary': found.summary,
        'efficiency': found.efficiency.by_trainer,
        'efficiency_of_run': found.efficiency.of_run,
        'node_s': [asdict(cause) for cause in found.causes],
        'decisions': asdict(found.decisions),
        'scaling': [asdict(one) for scaling in found.scalings.values() for one in scaling],
        'metrics': {
            metric: {name: [astuple(point) for point in curve] for name, curve in of.items()}
            for metric, of in found.metrics.items()
        },
        'shapes': [asdict(tried) for tried in found.shapes],
        'rescale': [asdict(cost) for cost in found.rescales],
        'outcomes': [
            {
                **asdict(o),
                'run': names[o.run],
                'at': o.at - begun[o.run],
                'until': o.until - begun[o.run],
            }
            for o in found.outcomes
        ],
    }
