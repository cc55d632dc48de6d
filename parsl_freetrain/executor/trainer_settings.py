"""What may be asked of a trainer: the arguments of ``@freetrain_app``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import ASSUMED_RESCALE_S, Efficiency, ScalingCurve, Shape, Trainer
from parsl_freetrain.executor.trainers import Terms
from parsl_freetrain.training.fragment import MODES, REPRODUCIBLE, SCALED, check_shape
from parsl_freetrain.training.policies import POLICIES
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled
from parsl_freetrain.training.store import RESUME

NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`parsl_freetrain.app.freetrain_app`, with their defaults filled in."""

    min_nodes: int
    max_nodes: int
    total_samples: int | None
    total_epochs: float | None
    curve: ScalingCurve | None
    rescale_up_s: float | None
    rescale_down_s: float | None
    priority: float
    sizes: tuple[int, ...]
    shapes: Mapping[int, Shape]
    finish_by_s: float | None
    efficiency: Efficiency | None
    user: str
    group: str
    mode: str
    shards: int
    seed: int
    checkpoint_every_s: float
    keep_checkpoints: int | Retention
    ranks_per_node: int
    threads_per_rank: int
    scaled: Scaled | None
    on_nan: str
    resume: str | None

    @classmethod
    def of(cls, name: str, *, min_nodes: int | None, max_nodes: int | None, sizes: Sequence[int] | None,
           shapes: Mapping[int, Shape] | None, scaling: Mapping[int, float] | None, efficiency: Mapping[int, float] | None,
           finish_by: datetime | float | None, shards: int | None, ranks_per_node: int, **others: Any) -> Settings:
        """What a decorator on ``name`` was given.

        Raises
        ------
        BadInput
            If it contradicts itself.
        """
        where = f'@freetrain_app on {name!r}'
        if sizes is not None and shapes is not None:
            raise BadInput(f'{where}: both sizes and shapes are given; the node counts of shapes are the sizes, so leave sizes out.')
        for what, given in (('sizes', sizes), ('shapes', shapes)):
            if given is not None and (not given or min(given) < 1):
                raise BadInput(f'{where}: {what} is {given}; it must have node counts, each at least 1.')
        counts = tuple(sorted(set(sizes or shapes or ())))
        most = max(counts, default=1) if max_nodes is None else max_nodes
        least = min(counts, default=1) if min_nodes is None else min_nodes
        return cls(
            min_nodes=least, max_nodes=most, sizes=counts, shapes=dict(shapes or {}), ranks_per_node=ranks_per_node,
            curve=ScalingCurve.from_points(dict(scaling)) if scaling else None,
            efficiency=Efficiency(tuple(sorted(efficiency)), tuple(efficiency[n] for n in sorted(efficiency))) if efficiency else None,
            finish_by_s=finish_by.timestamp() if isinstance(finish_by, datetime) else finish_by,
            shards=most * ranks_per_node if shards is None else shards, **others)

    def trainer(self, name: str) -> Trainer:
        costs = {'up': self.rescale_up_s, 'down': self.rescale_down_s}
        up_s, down_s = (ASSUMED_RESCALE_S if seconds is None else seconds for seconds in costs.values())
        return Trainer(name, self.min_nodes, self.max_nodes, self.total_samples, self.curve, up_s, down_s,
                       self.priority, self.sizes, self.finish_by_s, self.efficiency, self.user, self.group,
                       tuple(way for way, seconds in costs.items() if seconds is not None))

    def terms(self, store: str) -> Terms:
        """How the fragments of a trainer with checkpoint folder ``store`` train."""
        keep = Retention(self.keep_checkpoints) if isinstance(self.keep_checkpoints, int) else self.keep_checkpoints
        return Terms(store, self.total_samples, self.total_epochs, self.mode, self.shards, self.seed, self.checkpoint_every_s, keep,
                     self.ranks_per_node, self.scaled or Scaled(), self.on_nan, self.shapes, self.threads_per_rank)

    def check(self, name: str) -> None:
        """Refuse what can never be trained.

        Raises
        ------
        BadInput
            With a sentence that says what would be right.
        """
        where = f'@freetrain_app on {name!r}'
        self.trainer(name)
        check_name(name)
        totals = [t for t in (self.total_samples, self.total_epochs) if t is not None]
        if len(totals) != 1:
            raise BadInput(f'{where}: {len(totals)} of total_samples and total_epochs are given; say by one of them what is trained.')
        if not math.isfinite(totals[0]) or totals[0] <= 0:
            raise BadInput(f'{where}: the total to train is {totals[0]}; it must be more than 0.')
        if self.finish_by_s is not None and self.total_samples is None:
            raise BadInput(f'{where}: finish_by is given with total_epochs; state total_samples, so that it is known how much is left.')
        if self.mode not in MODES:
            raise BadInput(f'{where}: there is no mode {self.mode!r}; choose one of {", ".join(MODES)}.')
        keep = self.keep_checkpoints if isinstance(self.keep_checkpoints, int) else self.keep_checkpoints.last
        if self.scaled is not None and self.mode != SCALED:
            raise BadInput(f"{where}: scaled is given, but mode is {self.mode!r}; say mode='scaled', or leave scaled out.")
        if self.on_nan not in POLICIES:
            raise BadInput(f'{where}: on_nan is {self.on_nan!r}; it must be one of {", ".join(map(repr, POLICIES))}.')
        for what, value, least in (('ranks_per_node', self.ranks_per_node, 1), ('threads_per_rank', self.threads_per_rank, 1),
                                   ('shards', self.shards, 1), ('keep_checkpoints', keep, 1)):
            if value < least:
                raise BadInput(f'{where}: {what} is {value}; it must be at least {least}.')
        if self.mode == REPRODUCIBLE and self.shards < self.max_nodes * self.ranks_per_node:
            raise BadInput(f'{where}: {self.max_nodes} nodes with {self.ranks_per_node} ranks each cannot share {self.shards} virtual '
                           f'shards; shards must be at least {self.max_nodes * self.ranks_per_node}.')
        for nodes, shape in self.shapes.items():
            here = nodes * self.ranks_per_node
            if shape.ranks != here:
                raise BadInput(f'{where}: the shape of {nodes} nodes is {shape}, which takes {shape.ranks} ranks; its parts must multiply '
                               f'to {here}, the ranks of {nodes} nodes with {self.ranks_per_node} each.')
            check_shape(shape, self.mode, self.on_nan, where)
        if self.resume is not None and self.resume not in RESUME:
            raise BadInput(f'{where}: resume is {self.resume!r}; it must be one of {", ".join(map(repr, RESUME))}.')
        if not math.isfinite(self.checkpoint_every_s) or self.checkpoint_every_s <= 0:
            raise BadInput(f'{where}: checkpoint_every_s is {self.checkpoint_every_s}; it must be a positive number of seconds.')


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadInput(f'{name!r} cannot name a trainer: it names a folder too, so use letters, digits, dots, dashes and underscores.')
