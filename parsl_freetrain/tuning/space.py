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
        If the range is empty or endless, or not positive with ``log``.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not finite or not self.low < self.high or (self.log and self.low <= 0):
            raise BadInput(
                f'{self}: low and high must be finite, and low less than high'
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
        If there is nothing to choose from, or there are infinitely many.
    """
    for name, choices in space.items() if isinstance(space, Mapping) else ():
        listed = hasattr(choices, '__len__') and not isinstance(choices, str) and len(choices)
        if not isinstance(choices, Uniform) and not listed:
            raise BadInput(
                f'tune: the choices for {name!r} are {choices!r}; they must be a list with at '
                'least one value, or a Uniform.'
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
