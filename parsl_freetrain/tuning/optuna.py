"""Optuna's samplers and pruners for trainings in fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.tuning.search import Trial, Tuned, epochs_of, search
from parsl_freetrain.tuning.space import Uniform, check_choices, whole

try:
    import optuna
except ModuleNotFoundError as missing:
    raise BadInput(
        f'parsl_freetrain.tuning.optuna needs {missing.name}, which is not installed: pip install '
        '"parsl-freetrain[optuna]".'
    ) from missing


def optimize(
    study: Any,
    train: FreeTrainApp,
    space: Mapping[str, Sequence[Any] | Uniform] | Callable[[Any], dict[str, Any]],
    *args: Any,
    trials: int,
    metric: str = 'loss',
    at_once: int = 4,
) -> Tuned:
    """Search with a study of Optuna: its sampler proposes settings, and its pruner decides after
    each epoch which ones are dropped. Those give their nodes back at once.

    Parameters
    ----------
    study
        The study, with one direction. It learns all values, and which trials were pruned or failed.
    train, *args, metric
        As in :func:`~parsl_freetrain.tuning.search.tune`.
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
    whole(trials=trials)
    epochs = epochs_of(train)
    mode = 'max' if study.direction == optuna.study.StudyDirection.MAXIMIZE else 'min'
    asked = _Asked(study, _function_of(space), trials, epochs)
    return search(train, asked, args, metric, mode, range(1, epochs), at_once)


def _function_of(
    space: Mapping[str, Sequence[Any] | Uniform] | Callable[[Any], dict[str, Any]],
) -> Callable[[Any], dict[str, Any]]:
    if callable(space):
        return space
    if not isinstance(space, Mapping):
        raise BadInput(
            f'optimize: the space is {space!r}; it must be a dict of choices by name, or a '
            "function of Optuna's trial."
        )
    check_choices(space)

    def suggest(trial: Any) -> dict[str, Any]:
        return {
            name: trial.suggest_float(name, one.low, one.high, log=one.log)
            if isinstance(one, Uniform)
            else trial.suggest_categorical(name, list(one))
            for name, one in space.items()
        }

    return suggest


class _Asked:
    """The settings of a study."""

    def __init__(
        self, study: Any, space: Callable[[Any], dict[str, Any]], trials: int, epochs: int
    ) -> None:
        self._study, self._space, self._trials, self._epochs = study, space, trials, epochs
        self._of: list[Any] = []

    def propose(self, number: int) -> dict[str, Any] | None:
        if number >= self._trials:
            return None
        self._of.append(self._study.ask())
        return self._space(self._of[number])

    def goes_on(self, number: int, epochs: int, value: float) -> bool:
        self._of[number].report(value, epochs)
        return not self._of[number].should_prune()

    def ended(self, number: int, trial: Trial) -> None:
        states = optuna.trial.TrialState
        if trial.dropped:
            self._study.tell(self._of[number], state=states.PRUNED)
        elif self._epochs in trial.values:
            self._study.tell(self._of[number], trial.values[self._epochs])
        else:
            self._study.tell(self._of[number], state=states.FAIL)
