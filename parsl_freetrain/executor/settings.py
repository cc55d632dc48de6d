"""What may be asked of an executor."""

from __future__ import annotations

import math

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.objectives import metric_named
from parsl_freetrain.training.store import RESUME


def check_settings(*, metric: str, resume: str, horizon_s: float, hang_s: float, max_workers_per_node: float, retries: int,
                   trainers_at_a_time: int | None) -> None:
    """Refuse settings that cannot be used; they mean what they mean to FreeTrainExecutor.

    Raises
    ------
    BadInput
        One of them.
    """
    metric_named(metric)
    for what, count, least in (('max_workers_per_node', max_workers_per_node, 0), ('retries', retries, 0),
                               ('trainers_at_a_time', trainers_at_a_time, 1)):
        if count is not None and count < least:
            raise BadInput(f'{what} is {count}; it must be {least} or more.')
    if resume not in RESUME:
        raise BadInput(f'resume is {resume!r}; it must be one of {", ".join(map(repr, RESUME))}.')
    if not math.isfinite(horizon_s) or horizon_s <= 0:
        raise BadInput(f'horizon_s is {horizon_s}; it must be a positive number of seconds.')
    if not math.isfinite(hang_s) or hang_s < 2:
        raise BadInput(f'hang_s is {hang_s}; it must be a number of seconds, 2 or more.')
