"""The settings among which a search chooses."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


@dataclass(frozen=True)
class Uniform:
    """A number from ``low`` to ``high``; with ``log``, its logarithm is uniform. Raises BadInput if
    the ends are no numbers, or the range is empty or endless, or not positive with ``log``.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        finite = all(isinstance(end, (int, float)) and math.isfinite(end) for end in ends)
        if not finite or not self.low < self.high or (self.log and self.low <= 0):
            raise BadInput(
                f'{self}: low and high must be finite numbers, and low less than high'
                f'{" and positive" if self.log else ""}.'
            )


Choices = Mapping[str, Sequence[Any] | Uniform]
Space = Choices | Sequence[Mapping[str, Any]]


def settings_of(space: Space) -> list[dict[str, Any]]:
    """The settings of a list, or all combinations of choices. BadInput: none, or endless."""
    if isinstance(space, Mapping):
        endless = [name for name, choices in space.items() if isinstance(choices, Uniform)]
        if endless:
            raise BadInput(f'tune: {endless[0]!r} is a range: say how many trials there are.')
        check_choices(space)
        values = [list(choices) for choices in space.values() if not isinstance(choices, Uniform)]
        found = [dict(zip(space, one, strict=True)) for one in itertools.product(*values)]
    else:
        found = [dict(setting) for setting in space]
    if not found or not all(found):
        raise BadInput('tune: the space has no settings.')
    return found


def drawn_from(space: Choices) -> Callable[[Any], dict[str, Any]]:
    """What lets Optuna's trial draw a setting. Raises BadInput if there is nothing to choose."""
    check_choices(space)

    def suggest(trial: Any) -> dict[str, Any]:
        return {
            name: trial.suggest_float(name, one.low, one.high, log=one.log)
            if isinstance(one, Uniform)
            else trial.suggest_categorical(name, list(one))
            for name, one in space.items()
        }

    return suggest


def check_choices(space: Choices) -> None:
    """Refuse what a search cannot choose from; raises BadInput."""
    if not space:
        raise BadInput('tune: the space has no settings.')
    for name, choices in space.items():
        if not isinstance(choices, Uniform) and not choices:
            raise BadInput(
                f'tune: the choices for {name!r} are {choices!r}; give at least one value.'
            )
