"""Searches over settings with Optuna: each is a trainer; a dropped one gives back its nodes."""

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.checked_settings import checked_arguments
from parsl_freetrain.core.model.checked_values import AtLeast1
from parsl_freetrain.core.model.errors import BadInput, TrainerFailed, needs
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.tuning.space import Choices, Space, drawn_from, settings_of

with needs('parsl_freetrain.tune'):
    import optuna

logger = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.2


@dataclass
class Trial:
    name: str  #: the trainer's name
    setting: dict[str, Any]  #: the first argument of the function after its context
    #: By number of epochs, the metric after these.
    values: dict[int, float] = field(default_factory=dict)
    #: The last one; None if the training has failed or was dropped before its first one.
    checkpoint: Checkpoint | None = None
    dropped: bool = False  #: whether it was stopped early
    error: BaseException | None = None  #: why it has failed; None if it has not


@dataclass(frozen=True)
class Tuned:
    """What a search has found: the best trial of those that trained to the end, and all trials."""

    best: Trial
    trials: tuple[Trial, ...]


@checked_arguments('tune')
def tune(
    train: FreeTrainApp,
    space: Space,
    *args: Any,
    algorithm: Literal['asha', 'hyperband', 'none'] = 'asha',
    metric: str = 'loss',
    mode: Literal['min', 'max'] = 'min',
    trials: AtLeast1 | None = None,
    factor: Annotated[int, Meta(ge=2)] = 3,
    first_epochs: AtLeast1 = 1,
    at_once: AtLeast1 | None = None,
    seed: int = 0,
) -> Tuned:
    """Search for the best setting of a training. Needs a loaded Parsl and the extra ``optuna``, and
    waits for the result.

    Every setting is a trainer of its own, and all share the nodes. The function reports the metric
    in its loop or in ``ctx.each_epoch``. A setting that is dropped is cancelled, so others get its
    nodes at once.

    Parameters
    ----------
    train
        A ``@freetrain_app`` with ``total_epochs``. Its function gets a setting, a dict, as the
        first argument after the context.
    space
        By name the choices, or a :class:`~parsl_freetrain.Uniform`; or a list of settings.
    *args
        Further arguments of the function.
    algorithm
        'asha': Optuna's SuccessiveHalvingPruner (Li et al., MLSys 2020); 'hyperband': its
        HyperbandPruner (Li et al., JMLR 2018); 'none' drops no setting.
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
    epochs = _epochs_of(train)
    pruners = {
        'asha': lambda: optuna.pruners.SuccessiveHalvingPruner(first_epochs, factor),
        'hyperband': lambda: optuna.pruners.HyperbandPruner(first_epochs, epochs, factor),
        'none': optuna.pruners.NopPruner,
    }
    study = optuna.create_study(
        study_name='tune',  # Hyperband chooses a trial's bracket by it
        direction='maximize' if mode == 'max' else 'minimize',
        sampler=optuna.samplers.RandomSampler(seed),
        pruner=pruners[algorithm](),
    )
    levels = [first_epochs]
    while levels[-1] < epochs:
        levels.append(levels[-1] * factor)
    if trials is None:
        settings = settings_of(space)
        trials = len(settings)
        draw: Callable[[Any], dict[str, Any]] = lambda trial: settings[trial.number]  # noqa: E731
    elif isinstance(space, Mapping):
        draw = drawn_from(space)
    else:
        raise BadInput(
            f'tune: the space is a list of settings, which are all trained; trials={trials} is '
            'for a space from which settings are drawn: leave it out.'
        )
    search = _Search(study, train, draw, metric, (*levels[:-1], epochs))
    return search.run(args, trials, at_once or trials)


@checked_arguments('optimize')
def optimize(
    study: Any,
    train: FreeTrainApp,
    space: Choices | Callable[[Any], dict[str, Any]],
    *args: Any,
    trials: AtLeast1,
    metric: str = 'loss',
    at_once: AtLeast1 = 4,
) -> Tuned:
    """Search with a study of Optuna: its sampler proposes settings, and its pruner decides after
    each epoch which ones are dropped. Those give their nodes back at once.

    Parameters
    ----------
    study
        The study, with one direction. It learns all values, and which trials were pruned or failed.
    train, *args, metric
        As in :func:`tune`.
    space
        By name the choices, or a :class:`~parsl_freetrain.Uniform`; or a function of Optuna's trial
        that returns a setting, for instance
        ``lambda trial: {'lr': trial.suggest_float('lr', 1e-4, 1e-1, log=True)}``.
    trials
        Number of settings.
    at_once
        Maximum number of trainers at a time. A sampler learns more with fewer.

    Raises
    ------
    BadInput
        If an argument is invalid.
    TrainerFailed
        If no training has reached its end.
    """
    if len(study.directions) != 1:
        raise BadInput('optimize takes a study with one direction.')
    draw = drawn_from(space) if isinstance(space, Mapping) else space
    levels = range(1, _epochs_of(train) + 1)
    return _Search(study, train, draw, metric, levels).run(args, trials, at_once)


def _epochs_of(train: FreeTrainApp) -> int:
    total = train.spec.total_epochs
    if total is None or total != int(total):
        raise BadInput(
            'tune needs a @freetrain_app with a whole number of total_epochs to compare after.'
        )
    return int(total)


class _Search:
    """Trains what a study proposes, and compares after some numbers of epochs up to the total."""

    def __init__(
        self,
        study: Any,
        train: FreeTrainApp,
        draw: Callable[[Any], dict[str, Any]],
        metric: str,
        levels: Sequence[int],
    ) -> None:
        self._study, self._draw, self._metric, self._levels = study, draw, metric, levels
        noting = _noting(train.function, metric, levels)
        self._app = FreeTrainApp(noting, train.spec, train.executor)
        self._name = train.name
        self._trials: list[Trial] = []
        self._running: dict[TrainingFuture, tuple[Trial, Any]] = {}

    def run(self, args: Sequence[Any], number: int, at_once: int) -> Tuned:
        """Train ``number`` settings, no more than ``at_once`` at a time."""
        try:
            while self._running or len(self._trials) < number:
                while len(self._trials) < number and len(self._running) < at_once:
                    self._begin(args)
                wait(self._running, _LOOK_EVERY_S, FIRST_COMPLETED)
                for future, (trial, asked) in [*self._running.items()]:
                    done = future.done()  # before its news, which then are all
                    self._compare(future, trial, asked)
                    if done:
                        _end(trial, future)
                        self._tell(trial, asked)
                        del self._running[future]
        finally:
            for future in self._running:
                future.cancel()
        return Tuned(self._best(), tuple(self._trials))

    def _begin(self, args: Sequence[Any]) -> None:
        asked = self._study.ask()
        setting = self._draw(asked)
        # Another search must not go on from the checkpoints of another setting.
        digest = hashlib.blake2b(repr(sorted(setting.items())).encode(), digest_size=4).hexdigest()
        trial = Trial(f'{self._name}-{len(self._trials)}-{digest}', setting)
        future = self._app(setting, *args, trainer_name=trial.name)
        self._trials.append(trial)
        self._running[future] = trial, asked

    def _compare(self, future: TrainingFuture, trial: Trial, asked: Any) -> None:
        known = future.result().metrics if _finished(future) else future.progress().metrics
        for level in self._levels:
            name = f'{self._metric}@{level}'
            if level in trial.values or name not in known:
                continue
            trial.values[level] = known[name]
            if level < self._levels[-1]:
                asked.report(known[name], level)
                if asked.should_prune():
                    trial.dropped = True
                    future.cancel()
                    return

    def _tell(self, trial: Trial, asked: Any) -> None:
        states = optuna.trial.TrialState
        value = trial.values.get(self._levels[-1])
        if trial.dropped:
            self._study.tell(asked, state=states.PRUNED)
        elif value is None or math.isnan(value):
            self._study.tell(asked, state=states.FAIL)
        else:
            self._study.tell(asked, value)

    def _best(self) -> Trial:
        last = self._levels[-1]
        ended = [t for t in self._trials if not math.isnan(t.values.get(last, math.nan))]
        if ended:
            maximize = self._study.direction == optuna.study.StudyDirection.MAXIMIZE
            return (max if maximize else min)(ended, key=lambda trial: trial.values[last])
        failed = next((trial for trial in self._trials if trial.error is not None), None)
        if failed is None:
            raise TrainerFailed('tune: no setting was trained to the end.')
        raise TrainerFailed(
            f'tune: no setting was trained to the end. {failed.name} has failed: {failed.error}'
        ) from failed.error


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

        ctx._run.hooks.after_epoch.append(note)
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
