"""What may be asked of an executor."""

from __future__ import annotations

import math
from collections.abc import Mapping

from parsl_freetrain.core.bids import candidate_of
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.limits import caps_by_owner
from parsl_freetrain.core.objectives import objective_named
from parsl_freetrain.core.profile import Profile
from parsl_freetrain.core.words import Trainer
from parsl_freetrain.training.store import RESUME


def check_settings(*, metric: str, resume: str, horizon_s: float, hang_s: float, step_s: float, max_workers_per_node: float, retries: int,
                   trainers_at_a_time: int | None, min_rescale_s: float, keep_free: int, max_nodes: int | None,
                   caps: Mapping[str, int] | None, solver_time_limit_s: float) -> None:
    """Refuse settings that cannot be used; they mean what they mean to FreeTrainExecutor.

    Raises
    ------
    BadInput
        One of them.
    """
    objective_named(metric, 'metric')
    for what, count, least in (('max_workers_per_node', max_workers_per_node, 0), ('retries', retries, 0),
                               ('trainers_at_a_time', trainers_at_a_time, 1), ('keep_free', keep_free, 0), ('max_nodes', max_nodes, 1)):
        if count is not None and count < least:
            raise BadInput(f'{what} is {count}; it must be {least} or more.')
    if resume not in RESUME:
        raise BadInput(f'resume is {resume!r}; it must be one of {", ".join(map(repr, RESUME))}.')
    for what, seconds in (('horizon_s', horizon_s), ('step_s', step_s), ('solver_time_limit_s', solver_time_limit_s)):
        if not math.isfinite(seconds) or seconds <= 0:
            raise BadInput(f'{what} is {seconds}; it must be a positive number of seconds.')
    if not math.isfinite(hang_s) or hang_s < 2:
        raise BadInput(f'hang_s is {hang_s}; it must be a number of seconds, 2 or more.')
    if not math.isfinite(min_rescale_s) or min_rescale_s < 0:
        raise BadInput(f'min_rescale_s is {min_rescale_s}; it must be a number of seconds, 0 or more.')
    caps_by_owner(caps or {})


def check_trainer(trainer: Trainer, metric: str, samples: int, at: float) -> None:
    """Refuse a trainer of which the executor's metric cannot say what it is worth.

    Parameters
    ----------
    samples
        What it has trained so far.
    at
        Now, in seconds since the epoch.

    Raises
    ------
    BadInput
        Naming the trainer and the node count.
    """
    objective_named(metric, 'metric')(candidate_of(trainer, Profile(trainer.curve).curve(trainer.max_nodes, 1.0), at, samples))
