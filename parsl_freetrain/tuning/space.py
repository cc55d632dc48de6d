"""The settings among which a search chooses."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


@dataclass(frozen=True)
class Uniform:
    """A number from ``low`` to ``high``; with ``log``, its logarithm is uniform.

    Raises
    ------
    BadInput
        If the ends are no numbers, or the range is empty or endless, or not positive with ``log``.
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

    def draw(self, source: random.Random) -> float:
        """Draw a number."""
        if self.log:
            return math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return source.uniform(self.low, self.high)


Space = Mapping[str, Sequence[Any] | Uniform] | Sequence[Mapping[str, Any]]


def settings_of(space: Space, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """The settings of a search.

    Parameters
    ----------
    space
        By name the choices, or a :class:`Uniform`; or the settings themselves.
    trials
        How many are drawn at random. None: all combinations of the choices.
    seed
        Of what is drawn.

    Raises
    ------
    BadInput
        If there is nothing to choose from, or there are infinitely many, or the number of trials is
        invalid.
    """
    if trials is not None:
        whole(trials=trials)
    if isinstance(space, Mapping):
        check_choices(space)
    elif isinstance(space, str) or not all(isinstance(setting, Mapping) for setting in space):
        raise BadInput(
            f'tune: the space is {space!r}; it must be a dict of choices by name, or a list of '
            'dicts, one for each setting.'
        )
    elif trials is not None:
        raise BadInput(
            f'tune: the space is a list of settings, which are all trained; trials={trials} is '
            'for a space from which settings are drawn: leave it out.'
        )
    if not isinstance(space, Mapping):
        found = [dict(setting) for setting in space]
    elif trials is None:
        endless = [name for name, choices in space.items() if isinstance(choices, Uniform)]
        if endless:
            raise BadInput(f'tune: {endless[0]!r} is a range: say how many trials there are.')
        values = [list(choices) for choices in space.values() if not isinstance(choices, Uniform)]
        found = [dict(zip(space, one, strict=True)) for one in itertools.product(*values)]
    else:
        source = random.Random(seed)
        found = [
            {
                name: one.draw(source) if isinstance(one, Uniform) else source.choice(list(one))
                for name, one in space.items()
            }
            for _ in range(trials)
        ]
    if not found or not all(found):
        raise BadInput('tune: the space has no settings.')
    return found


def whole(**numbers: Any) -> None:
    """Refuse an argument of ``tune`` that is not a whole number of at least 1; raises BadInput."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise BadInput(f'tune: {name} is {number!r}; it must be a whole number of at least 1.')


def check_choices(space: Mapping[str, Any]) -> None:
    """Refuse what a search cannot choose from; raises BadInput."""
    for name, choices in space.items():
        listed = hasattr(choices, '__len__') and not isinstance(choices, str) and len(choices)
        if not isinstance(choices, Uniform) and not listed:
            raise BadInput(
                f'tune: the choices for {name!r} are {choices!r}; they must be a list with at '
                'least one value, or a Uniform.'
            )
