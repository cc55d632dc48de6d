"""The trainers of a replay, as JSON, plain or gzipped."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from parsl_freetrain.core.allocation.objectives import Metric
from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.checked_settings import Settings, read_settings
from parsl_freetrain.core.model.checked_values import Name, Number
from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.host.files import read_zipped


@dataclass(frozen=True)
class ReplayTrainer:
    """A trainer of a replay, with its total in samples and its speed in samples per second."""

    trainer: Trainer
    submit_s: float  # by the trace's clock
    objective: ScalingCurve | None = None  # worth per second; None: its speed

    @property
    def wanted(self) -> int:
        """The number of nodes beyond which more are of no use to it."""
        trainer = self.trainer
        curves = [curve for _, curve in trainer.class_curves]
        if not curves and (only := self.objective or trainer.curve):
            curves = [only]
        return max(Profile(curve).best_count(trainer.counts()) for curve in curves)


def objectives_of(trainers: Iterable[ReplayTrainer]) -> Metric:
    stated = {t.trainer.name: t.objective for t in trainers}
    return lambda candidate: stated[candidate.name] or candidate.curve


class _Row(Settings, frozen=True, kw_only=True):
    name: Name
    submit_s: Number = 0.0
    min_nodes: int = 1
    max_nodes: int
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0
    total_samples: float
    nodes: tuple[int, ...]
    samples_per_s: tuple[float, ...] | None = None
    class_samples_per_s: dict[str, tuple[float, ...]] | None = None
    objective: tuple[float, ...] | None = None
    function: str = ''


def read_trainers(path: str | Path) -> tuple[ReplayTrainer, ...]:
    """Read trainers from a JSON list of objects, in the order of the file. Each has ``name``,
    ``max_nodes``, ``total_samples``, ``nodes`` (increasing) and for each of these
    ``samples_per_s``, or ``class_samples_per_s`` by node class; it may have ``submit_s`` (0),
    ``min_nodes`` (1), ``rescale_up_s``, ``rescale_down_s`` (0), ``objective`` (as samples_per_s)
    and ``function`` (what it trains: learned curves are shared). Raises BadInput, with file and
    trainer.
    """
    data = read_zipped(path, 'a JSON list of trainers')
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f'{path} is not JSON ({error}); give a list of trainers.') from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f'{path} is no list of objects; give a JSON list of trainers.')
    if not rows:
        raise BadInput(f'{path} has no trainer; give at least one.')
    trainers: dict[str, ReplayTrainer] = {}
    for number, raw in enumerate(rows, 1):
        name = raw.get('name') or number
        where = f'{path}: trainer {name!r}'
        row = read_settings(_Row, where, raw)
        if row.name in trainers:
            raise BadInput(f'{path}: two trainers are called {row.name!r}; name each differently.')
        try:
            trainers[row.name] = _trainer(row)
        except BadInput as error:
            named = repr(row.name) in str(error)
            raise BadInput(f'{path if named else where}: {error}') from None
    return tuple(trainers.values())


def _trainer(row: _Row) -> ReplayTrainer:
    if not row.total_samples.is_integer():
        refuse('total_samples', row.total_samples, 'a whole number')
    if (row.samples_per_s is None) != bool(row.class_samples_per_s):
        raise BadInput('give either samples_per_s, or class_samples_per_s by node class.')
    if row.objective and row.class_samples_per_s:
        raise BadInput('objective does not go with class_samples_per_s; name one in a study.')
    nodes = row.nodes
    per_class = (row.class_samples_per_s or {}).items()
    on_class = {name: ScalingCurve(nodes, rates) for name, rates in per_class}
    curve = ScalingCurve(nodes, row.samples_per_s) if row.samples_per_s else None
    objective = ScalingCurve(nodes, row.objective) if row.objective else curve
    trainer = Trainer(
        row.name,
        row.min_nodes,
        row.max_nodes,
        int(row.total_samples),
        curve,
        row.rescale_up_s,
        row.rescale_down_s,
        function=row.function,
        class_curves=tuple(on_class.items()),
    )
    if objective and not any(objective.rate_at(n) > 0 for n in trainer.counts()):
        raise BadInput(
            f'the objective is 0 at every count from {row.min_nodes} to {row.max_nodes} nodes, '
            f'so that it would never run; it must be above 0 at one of them.'
        )
    return ReplayTrainer(trainer, row.submit_s, objective)
