"""What cannot be meant is refused by a sentence; a curve is linear between its points."""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random
from typing import Annotated, Literal, Protocol

import pytest
from hypothesis import strategies as st
from msgspec import Meta

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.core.model.types import Checkpoint, Efficiency, ScalingCurve, Trainer
from tests.support.properties import holds_for

CURVE = ScalingCurve((1, 2, 4), (10.0, 19.0, 36.0))


def test_bad_input_gets_one_sentence() -> None:
    for make, says in (
        (lambda: ScalingCurve((), ()), 'and at least one: got 0'),
        (lambda: ScalingCurve((1, 2), (1.0,)), '2 node counts and 1 rates'),
        (lambda: ScalingCurve((2, 1), (1.0, 2.0)), '[2, 1]'),
        (lambda: ScalingCurve((1, 1), (1.0, 2.0)), 'must increase'),
        (lambda: ScalingCurve((-1, 1), (1.0, 2.0)), 'must increase from 0 on: got [-1, 1]'),
        (lambda: ScalingCurve((1,), (-1.0,)), '[-1.0]'),
        (lambda: ScalingCurve((1,), (math.nan,)), 'finite'),
        (lambda: ScalingCurve((0, 1), (5.0, 9.0)), 'at 0 nodes must be 0'),
        (lambda: Trainer('net', 0, 2), "'net': min_nodes is 0"),
        (lambda: Trainer('net', 3, 2), 'min_nodes is 3 and max_nodes 2'),
        (lambda: Trainer('net', 1, 2, 0), 'total_samples is 0'),
        (lambda: Trainer('net', 1, 2, rescale_up_s=-1.0), 'rescale_up_s is -1.0'),
        (lambda: Trainer('net', 1, 2, rescale_down_s=math.inf), 'rescale_down_s is inf'),
        (
            lambda: Trainer('net', 2, 3, sizes=(1, 4)),
            'none of its sizes [1, 4] is from min_nodes to max_nodes, 2 to 3',
        ),
        (
            lambda: Trainer(
                'net', 1, 4, sizes=(4,), curve=ScalingCurve((1, 2, 4), (1.0, 2.0, 0.0))
            ),
            'rate 0 at every count',
        ),
        (lambda: Trainer('net', 1, 1, finish_by_s=math.nan), 'finish_by_s is nan'),
        (lambda: Efficiency((1, 2), (1.0,)), 'got 2 node counts and 1 values'),
        (lambda: Efficiency((2, 1), (1.0, 1.0)), 'must increase from 1 on: got [2, 1]'),
        (lambda: Efficiency((1,), (1.5,)), 'value[0] is 1.5; it must be a number from 0 to 1'),
        (lambda: Shape(data=0), 'has 0 ranks along data'),
        (lambda: Shape(spatial=(1, 0, 1)), 'has 0 ranks along height'),
        (lambda: Shape(spatial=(1, 1)), 'spatial is (1, 1); it must have 3 numbers'),  # type: ignore[arg-type]
        (lambda: Shape(spatial=2), 'spatial is 2; it must have 3 numbers'),  # type: ignore[arg-type]
        (lambda: Shape(data=2.0), 'has 2.0 ranks along data; it must be a whole number'),  # type: ignore[arg-type]
        (lambda: Shape(data='2'), "has '2' ranks along data"),  # type: ignore[arg-type]
        (lambda: Shape(pipeline=True), 'has True ranks along pipeline'),
        (lambda: Shape(spatial=(2, 1, 1.0)), 'has 1.0 ranks along width'),  # type: ignore[arg-type]
        (lambda: ControllerSettings(caps={'user anna': -1}), 'The cap of user anna is -1 nodes'),
        (
            lambda: Trainer('net', 2, 3, curve=ScalingCurve((1, 2, 3, 4), (1.0, 0.0, 0.0, 9.0))),
            'from 2 to 3 nodes',
        ),
        (lambda: ControllerSettings(horizon_s=math.nan), 'horizon_s is nan'),
        (lambda: ControllerSettings(min_hole_s=-1.0), 'min_hole_s is -1.0'),
        (lambda: ControllerSettings(workers_per_node=0), 'at least 1'),
    ):
        with pytest.raises(BadInput) as caught:
            make()
        sentence = str(caught.value)
        assert says in sentence
        assert sentence.endswith('.')
        assert '\n' not in sentence
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, FreeTrainError)


def test_settings_may_be_unlimited() -> None:
    settings = ControllerSettings(idle_block_s=math.inf, trainers_at_a_time=None)
    assert settings.trainers_at_a_time is None


def test_rate_between_before_and_behind_the_points() -> None:
    rates = [CURVE.rate_at(n) for n in (-1, 0, 1, 2, 3, 4, 5, 99)]
    assert rates == [0, 0, 10, 19, 27.5, 36, 36, 36]
    late = ScalingCurve((4, 8), (40.0, 60.0))
    assert [late.rate_at(n) for n in (1, 2, 4, 6)] == [10, 20, 40, 50]


@holds_for(
    st.dictionaries(st.integers(1, 20), st.floats(0, 1e6), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    tries=100,
)
def test_the_order_of_points_does_not_matter(points: dict[int, float], random: Random) -> None:
    shuffled = list(points.items())
    random.shuffle(shuffled)
    curve = ScalingCurve.from_points(dict(shuffled))
    assert curve == ScalingCurve.from_points(points)
    assert {n: curve.rate_at(n) for n in points} == points
    for n in range(25):
        assert 0.0 <= curve.rate_at(n) <= max(points.values()) * (1 + 1e-12)


def test_metrics_of_a_checkpoint_are_no_part_of_its_identity() -> None:
    assert Checkpoint('net', '/c/1', 10, 1, {'loss': 0.5}) == Checkpoint(
        'net', '/c/1', 10, 1, {'loss': math.nan}
    )


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
