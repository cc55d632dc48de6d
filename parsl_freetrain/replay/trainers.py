"""The trainers of a replay, as JSON, plain or gzipped."""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from parsl_freetrain.core.allocation.objectives import Metric
from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

_GZIP_MAGIC = b'\x1f\x8b'


@dataclass(frozen=True)
class ReplayTrainer:
    """A trainer of a replay.

    Attributes
    ----------
    trainer
        Its total in samples and its speed in samples per second.
    submit_s
        When it is submitted, in seconds of the trace's clock.
    objective
        Worth per second at each node count, such as the speed-up over one node; None: its speed in
        samples per second on the nodes' class.
    """

    trainer: Trainer
    submit_s: float
    objective: ScalingCurve | None = None

    @property
    def wanted(self) -> int:
        """The number of nodes beyond which more are of no use to it."""
        trainer = self.trainer
        curves = [curve for _, curve in trainer.class_curves]
        if not curves and (only := self.objective or trainer.curve):
            curves = [only]
        return max(Profile(curve).best_count(trainer.counts()) for curve in curves)


def objectives_of(trainers: Iterable[ReplayTrainer]) -> Metric:
    """The objectives of trainers as their file gives them."""
    stated = {t.trainer.name: t.objective for t in trainers}
    return lambda candidate: stated[candidate.name] or candidate.curve


_Points = Annotated[list[float], Field(min_length=1)]


class _Row(BaseModel):
    model_config = ConfigDict(extra='forbid', allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1)]
    submit_s: float = 0.0
    min_nodes: int = 1
    max_nodes: int
    rescale_up_s: float = 0.0
    rescale_down_s: float = 0.0
    total_samples: float
    nodes: Annotated[list[int], Field(min_length=1)]
    samples_per_s: _Points | None = None
    class_samples_per_s: dict[str, _Points] | None = None
    objective: _Points | None = None
    function: str = ''


_ROWS = TypeAdapter(list[_Row])


def read_trainers(path: str | Path) -> tuple[ReplayTrainer, ...]:
    """Read trainers from a JSON list of objects, in the order of the file.

    Each has ``name``, ``max_nodes``, ``total_samples``, ``nodes`` (increasing) and, for each of
    these, ``samples_per_s``, or where nodes are unequal ``class_samples_per_s`` by node class; it
    may have ``submit_s`` (0), ``min_nodes`` (1), ``rescale_up_s``, ``rescale_down_s`` (0),
    ``objective`` (as samples_per_s) and ``function`` (what it trains: learned curves are shared).
    Speeds are interpolated linearly; 0 nodes train nothing.

    Raises
    ------
    BadInput
        An unreadable file or an invalid trainer; the message names file and trainer.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise BadInput(f'There is no file {path}; give a JSON list of trainers.') from None
    except (OSError, EOFError, ValueError) as error:
        raise BadInput(f'{path} cannot be read ({error}); give a JSON list of trainers.') from None
    try:
        rows = _ROWS.validate_json(data)
    except ValidationError as error:
        raise BadInput(_sentence(path, data, error)) from None
    if not rows:
        raise BadInput(f'{path} has no trainer; give at least one.')
    trainers: dict[str, ReplayTrainer] = {}
    for row in rows:
        if row.name in trainers:
            raise BadInput(
                f'{path}: two trainers are called {row.name!r}; each needs a name of its own.'
            )
        try:
            trainers[row.name] = _trainer(row)
        except BadInput as error:
            where = '' if repr(row.name) in str(error) else f'trainer {row.name!r}: '
            raise BadInput(f'{path}: {where}{error}') from None
    return tuple(trainers.values())


def _trainer(row: _Row) -> ReplayTrainer:
    if row.total_samples != math.floor(row.total_samples):
        raise BadInput(f'total_samples is {row.total_samples:g}; it must be a whole number.')
    if (row.samples_per_s is None) != bool(row.class_samples_per_s):
        raise BadInput('give either samples_per_s, or class_samples_per_s by node class.')
    if row.objective and row.class_samples_per_s:
        raise BadInput('objective does not go with class_samples_per_s; name one by --objective.')
    nodes = tuple(row.nodes)
    on_class = {
        name: ScalingCurve(nodes, tuple(rates))
        for name, rates in (row.class_samples_per_s or {}).items()
    }
    curve = ScalingCurve(nodes, tuple(row.samples_per_s)) if row.samples_per_s else None
    objective = ScalingCurve(nodes, tuple(row.objective)) if row.objective else curve
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


def _sentence(path: Path, data: bytes, error: ValidationError) -> str:
    """A sentence about the first error."""
    first = error.errors(include_url=False)[0]
    if first['type'] == 'json_invalid':
        return f'{path} is not JSON ({first["msg"]}); give a list of trainers.'
    where, *field = first['loc'] or ('',)
    if not isinstance(where, int):
        return f'{path}: {first["msg"]}; give a JSON list of trainers.'
    named = _name(data, where)
    trainer = f'trainer {named!r}' if named else f'trainer {where + 1} of the list'
    what = '.'.join(str(part) for part in field) or 'it'
    return f'{path}: {trainer}: {what}: {first["msg"]}.'


def _name(data: bytes, place: int) -> str:
    """The name of an invalid trainer, if it has one."""
    try:
        return (
            TypeAdapter(list[dict[str, object]])
            .validate_json(data)[place]
            .get('name', '')
            .__str__()
        )
    except ValidationError:
        return ''
