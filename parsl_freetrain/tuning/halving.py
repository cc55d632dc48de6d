"""Which settings go on: asynchronous successive halving (ASHA) and Hyperband."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.tuning.space import whole

ALGORITHMS = ('asha', 'hyperband', 'none')


def levels_of(epochs: int, factor: int, first: int) -> tuple[int, ...]:
    """The numbers of epochs after which settings are compared, before the last epoch: the total
    divided by the factor again and again, down to ``first``.

    Raises
    ------
    BadInput
        If the factor is less than 2, or ``first`` less than 1, or one is no whole number.
    """
    whole(factor=factor, first_epochs=first)
    if factor < 2:
        raise BadInput(f'tune: factor is {factor}; it must be at least 2.')
    levels, level = [], epochs / factor
    while level >= first:
        levels.append(math.floor(level))
        level /= factor
    return tuple(sorted(set(levels)))


@dataclass
class Halving:
    """Compares settings after the same number of epochs: those that are not in the best
    1 / ``factor`` of all that have come so far are dropped.

    In ``'asha'`` (Li et al., MLSys 2020) all settings are compared from the first level on. In
    ``'hyperband'`` (Li et al., JMLR 2018) they are divided into brackets, of which each later one
    begins with a later level and fewer settings. ``'none'`` drops none.

    Raises
    ------
    BadInput
        If the algorithm is unknown.
    """

    algorithm: str
    levels: tuple[int, ...]
    factor: int = 3
    maximize: bool = False
    _seen: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise BadInput(
                f'tune: algorithm is {self.algorithm!r}; it must be one of '
                f'{", ".join(map(repr, ALGORITHMS))}.'
            )

    def bracket(self, number: int) -> int:
        """The bracket of a setting, by its number: how many levels it is spared."""
        if self.algorithm != 'hyperband':
            return 0
        # As many settings in each bracket that all brackets train about the same number of epochs.
        last = len(self.levels)
        sizes = [
            math.ceil((last + 1) / (last - spared + 1) * self.factor ** (last - spared))
            for spared in range(last + 1)
        ]
        place = number % sum(sizes)
        for spared, size in enumerate(sizes):
            if place < size:
                return spared
            place -= size
        raise AssertionError

    def goes_on(self, number: int, level: int, value: float) -> bool:
        """Whether a setting goes on that has a value after a level. NaN is the worst value."""
        bracket = self.bracket(number)
        if self.algorithm == 'none' or level not in self.levels[bracket:]:
            return True
        cost = -value if self.maximize else value
        cost = math.inf if math.isnan(cost) else cost
        seen = self._seen[bracket, level]
        insort(seen, cost)
        if len(seen) < self.factor:
            return True  # there is nothing to compare with yet
        return cost <= seen[len(seen) // self.factor - 1]
