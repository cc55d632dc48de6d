"""Properties that hold for whatever is drawn; ``make test`` tries a quarter of the examples."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings

T = TypeVar('T', bound=Callable[..., None])


def examples(count: int) -> int:
    """How many of ``count`` examples are tried."""
    return count if 'ALL_EXAMPLES' in os.environ else max(5, count // 4)


def holds_for(*drawn: Any, tries: int, **named: Any) -> Callable[[T], T]:
    """A test that holds for all that is drawn, as with ``hypothesis.given``."""

    def decorate(test: T) -> T:
        with_drawn: Callable[[Any], Any] = given(*drawn, **named)
        so_often: Callable[[Any], Any] = settings(max_examples=examples(tries))
        marked: T = pytest.mark.properties(so_often(with_drawn(test)))
        return marked

    return decorate
