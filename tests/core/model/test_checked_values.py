"""What is said about a value that is not of a type, or beyond its bounds."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Protocol

import pytest
from msgspec import Meta

from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput


class Speaks(Protocol):
    def speak(self) -> str: ...


class Colour(StrEnum):
    RED = 'red'
    BLUE = 'blue'


def test_what_cannot_be_used_is_said_with_its_place() -> None:
    for value, hint, said in (
        (0, checked.AtLeast1, 'x is 0; it must be at least 1.'),
        (-1, Annotated[int, Meta(ge=0, le=9)], 'x is -1; it must be from 0 to 9.'),
        ('1', checked.AtLeast1, "x is '1'; it must be a whole number, at least 1."),
        (True, checked.Count, 'x is True; it must be a whole number, at least 0.'),
        (math.inf, checked.Seconds, 'x is inf; it must be a number of seconds, 0 or more.'),
        (math.nan, checked.Share, 'x is nan; it must be a number from 0 to 1.'),
        ('', checked.Name, "x is ''; it must be a text that is not empty."),
        (0, checked.AtLeast1 | None, 'x is 0; it must be at least 1.'),
        ('a', checked.AtLeast1 | None, "x is 'a'; it must be a whole number, at least 1 or None."),
        ([1, '2'], Literal['auto'] | Sequence[int], "x[1] is '2'; it must be a whole number."),
        ('all', Literal['auto'] | Sequence[int], "x is 'all'; it must be 'auto' or a list "),
        ({'a': -1}, Mapping[str, checked.Count], "x['a'] is -1; it must be at least 0."),
        ({1: 2}, dict[str, int], 'x: the name 1 is 1; it must be a text.'),
        (
            {'a': [0.5, 2]},
            dict[str, list[checked.Share]],
            "x['a'][1] is 2; it must be a number from 0 ",
        ),
        ([1], tuple[int, ...], 'x is [1]; it must be a list (each a whole number).'),
        ('green', Colour, "x is 'green'; it must be 'red' or 'blue'."),
        (3, Speaks, 'x is 3; it must be a Speaks.'),
    ):
        with pytest.raises(BadInput) as caught:
            checked.check_value('x', value, hint)
        assert str(caught.value).startswith(said)


def test_what_is_read_may_be_a_list_for_a_tuple_and_a_text_for_an_enum() -> None:
    checked.check_value('x', [1], tuple[int, ...], read=True)
    checked.check_value('x', 'red', Colour, read=True)
    with pytest.raises(BadInput, match="x is 'green'"):
        checked.check_value('x', 'green', Colour, read=True)


def test_settings_keep_within_their_bounds() -> None:
    class Crew(Settings, frozen=True, kw_only=True):
        least: checked.AtLeast1 = 1

    assert Crew(least=2).least == 2
    with pytest.raises(BadInput, match='Crew: least is 0; it must be at least 1.'):
        Crew(least=0)
