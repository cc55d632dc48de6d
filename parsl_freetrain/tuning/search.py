"""Searches: every setting is a trainer, and a dropped one gives its nodes back at once."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput, TrainerFailed
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.tuning.halving import Halving, levels_of
from parsl_freetrain.tuning.space import Space, settings_of, whole

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.2


@dataclass
class Trial:
    """One setting, and what came of it.

    Attributes
    ----------
    name
        The trainer's name.
    setting
        The first argument of the function after its context.
    values
        By number of epochs, the metric after these.
    checkpoint
        The last one; None if the training has failed or was dropped before its first one.
    dropped
        Whether it was stopped early.
    error
        Why it has failed; None if it has not.
    """

    name: str
    setting: dict[str, Any]
    values: dict[int, float] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    dropped: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class Tuned:
    """What a search has found: the best trial of those that trained to the end, and all trials."""

    best: Trial
    trials: tuple[Trial, ...]


class Proposer(Protocol):
    """Proposes settings, and decides which ones go on."""

    def propose(self, number: int) -> dict[str, Any] | None:
        """The setting of a trial, by its number from 0; None if there are no more."""
        ...

    def goes_on(self, number: int, epochs: int, value: float) -> bool:
        """Whether a trial goes on after some epochs."""
        ...

    def ended(self, number: int, trial: Trial) -> None:
        """A trial has ended."""
        ...


def tune(
    train: FreeTrainApp,
    space: Space,
    *args: Any,
    algorithm: str = 'asha',
    metric: str = 'loss',
    mode: str = 'min',
    trials: int | None = None,
    factor: int = 3,
    first_epochs: int = 1,
    at_once: int | None = None,
    seed: int = 0,
) -> Tuned:
    """Search for the best setting of a training. Needs a loaded Parsl, and waits for the result.

    Every setting is a trainer of its own, and all share the nodes. The function reports the metric
    in its loop or in ``ctx.each_epoch``. A setting that is dropped is cancelled, so others get its
    nodes at once.

    Parameters
    ----------
    train
        A ``@freetrain_app`` with ``total_epochs``. Its function gets a setting, a dict, as the
        first argument after the context.
    space
        By name the choices, or a :class:`~parsl_freetrain.tuning.space.Uniform`; or a list of
        settings.
    *args
        Further arguments of the function.
    algorithm
        'asha', 'hyperband' or 'none'; see :class:`~parsl_freetrain.tuning.halving.Halving`.
    metric, mode
        What is compared, and whether its best value is the 'min' or the 'max'.
    trials
        Number of settings that are drawn from the space; default all combinations.
    factor
        At each level about one setting in ``factor`` continues.
    first_epochs
        Minimum number of epochs before a setting is dropped.
    at_once
        Maximum number of trainers at a time; default all of them.
    seed
        Of the settings that are drawn.

    Raises
    ------
    BadInput
        If an argument is invalid; nothing is submitted then.
    TrainerFailed
        If no training has reached its end.
    """
    if mode not in ('min', 'max'):
        raise BadInput(f"tune: mode is {mode!r}; it must be 'min' or 'max'.")
    epochs = epochs_of(train)
    halving = Halving(algorithm, levels_of(epochs, factor, first_epochs), factor, mode == 'max')
    settings = settings_of(space, trials, seed)
    proposer = _Listed(settings, halving)
    number = len(settings) if at_once is None else at_once
    return search(train, proposer, args, metric, mode, halving.levels, number)


def epochs_of(train: FreeTrainApp) -> int:
    """The total of an app in whole epochs.

    Raises
    ------
    BadInput
        If it has none.
    """
    total = train.spec.total_epochs if isinstance(train, FreeTrainApp) else None
    if total is None or total != int(total):
        raise BadInput(
            'tune needs a @freetrain_app with a whole number of total_epochs, after which its '
            'settings are compared.'
        )
    return int(total)


def search(
    train: FreeTrainApp,
    proposer: Proposer,
    args: Sequence[Any],
    metric: str,
    mode: str,
    levels: Sequence[int],
    at_once: int,
) -> Tuned:
    """Train what a proposer proposes; see :func:`tune`."""
    whole(at_once=at_once)
    all_levels = (*levels, epochs_of(train))
    app = FreeTrainApp(_noting(train.function, metric, all_levels), train.spec, train.executor)
    running: dict[TrainingFuture, int] = {}
    trials: list[Trial] = []
    more = True
    try:
        while running or more:
            while more and len(running) < at_once:
                setting = proposer.propose(len(trials))
                if setting is None:
                    more = False
                    break
                trials.append(Trial(_name(train, len(trials), setting), setting))
                future = app(setting, *args, trainer_name=trials[-1].name)
                running[future] = len(trials) - 1
            wait(running, _LOOK_EVERY_S, FIRST_COMPLETED)
            for future, number in [*running.items()]:
                done = future.done()  # before its news, which then are all
                for level, value in _news(trials[number], future, metric, all_levels):
                    trials[number].values[level] = value
                    if level < all_levels[-1] and not proposer.goes_on(number, level, value):
                        trials[number].dropped = True
                        future.cancel()
                        break
                if done:
                    _end(trials[number], future)
                    proposer.ended(number, trials[number])
                    del running[future]
    finally:
        for future in running:
            future.cancel()
    return Tuned(_best(trials, mode, all_levels[-1]), tuple(trials))


def _name(train: FreeTrainApp, number: int, setting: dict[str, Any]) -> str:
    """A trainer's name, which is also that of its checkpoints: another search must not go on from
    what was trained with another setting.
    """
    digest = hashlib.blake2b(repr(sorted(setting.items())).encode(), digest_size=4).hexdigest()
    return f'{train.name}-{number}-{digest}'


def _news(
    trial: Trial, future: TrainingFuture, metric: str, levels: Sequence[int]
) -> list[tuple[int, float]]:
    """The values of levels that were not known."""
    known = future.result().metrics if _finished(future) else future.progress().metrics
    names = {level: f'{metric}@{level}' for level in levels if level not in trial.values}
    return [(level, known[name]) for level, name in names.items() if name in known]


def _noting(function: Callable[..., Any], metric: str, levels: Sequence[int]) -> Callable[..., Any]:
    """The function, which also reports the metric after each level under a name of its own."""

    @functools.wraps(function)
    def noting(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        def note() -> None:
            if ctx.epoch + 1 in levels:
                if metric not in ctx.metrics:
                    raise BadInput(
                        f'tune compares {metric!r}, which was not reported before the end of '
                        f'epoch {ctx.epoch + 1}: report it in the loop, or in a function that is '
                        'given to ctx.each_epoch.'
                    )
                ctx.report(**{f'{metric}@{ctx.epoch + 1}': ctx.metrics[metric]})

        ctx._hooks.after_epoch.append(note)
        return function(ctx, *args, **kwargs)

    return noting


def _finished(future: TrainingFuture) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _end(trial: Trial, future: TrainingFuture) -> None:
    trial.checkpoint = future.result() if _finished(future) else future.checkpoint
    # One that is dropped may have come to its end meanwhile.
    trial.dropped = trial.dropped or future.cancelled()
    if not future.cancelled() and (error := future.exception()) is not None:
        trial.error = error
        logger.warning('%s has failed with %s: %s', trial.name, trial.setting, error)


def _best(trials: Sequence[Trial], mode: str, last: int) -> Trial:
    sign = -1 if mode == 'max' else 1
    ended = [t for t in trials if not math.isnan(t.values.get(last, math.nan))]
    if not ended:
        failed = next((trial for trial in trials if trial.error is not None), None)
        if failed is None:
            raise TrainerFailed('tune: no setting was trained to the end.')
        raise TrainerFailed(
            f'tune: no setting was trained to the end. {failed.name} has failed: {failed.error}'
        ) from failed.error
    return min(ended, key=lambda trial: sign * trial.values[last])


class _Listed:
    """The settings of a list, by halving."""

    def __init__(self, settings: Sequence[dict[str, Any]], halving: Halving) -> None:
        self._settings, self._halving = settings, halving

    def propose(self, number: int) -> dict[str, Any] | None:
        return self._settings[number] if number < len(self._settings) else None

    def goes_on(self, number: int, epochs: int, value: float) -> bool:
        return self._halving.goes_on(number, epochs, value)

    def ended(self, number: int, trial: Trial) -> None:
        pass
