"""What counts the iterations of a loop from outside: ``enumerate``, and ``count`` in ``zip``."""

import ctypes
import gc
from collections.abc import Iterable
from itertools import count
from traceback import walk_stack
from types import GeneratorType
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


def counts() -> list[Any]:
    """What enumerates the iterations of the loop that asks for its next batch now: ``enumerate``,
    and ``count`` in ``zip``. Raises BadInput if ``zip`` asks anything else with it.
    """
    running = _referring(GeneratorType, [frame for frame, _ in walk_stack(None)])
    found = _referring(enumerate, running)
    for one in _referring(zip, _referring(tuple, running)):
        if any(map(_runs, its := one.__reduce__()[1])):
            others = [each for each in its if not _runs(each)]
            counting = all(type(each) is count and _at(each) is not None for each in others)
            if not (counting and _runs(its[0])):
                raise BadInput(
                    'zip asks something beside ctx.loop for each of its passes, which begins anew '
                    'in each fragment: use enumerate(ctx.loop(...)), or choose by ctx.samples.'
                )
            found.extend(others)
    return found


def _referring(kind: type, ones: Iterable[Any]) -> list[Any]:
    """Not by gc.get_objects(): no thread can complete a tuple to which others have a reference."""
    return [one for one in gc.get_referrers(*ones) if type(one) is kind]


def _runs(one: Any) -> bool:
    return isinstance(one, GeneratorType) and one.gi_running


def number_of(one: Any) -> int:
    return int(one.__reduce__()[1][type(one) is enumerate])


def _at(one: Any) -> Any:
    """Where its number is: behind what all objects begin with; None: elsewhere."""
    there = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
    return there if there.value == number_of(one) else None


def set_number(one: Any, number: int) -> None:
    """Nothing else can set it."""
    if (there := _at(one)) is not None:
        there.value = number
