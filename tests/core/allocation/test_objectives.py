"""Objectives by their formulas, and expressions that can do arithmetic and nothing else."""

import math
import warnings
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.objectives import (
    FIELDS,
    METRICS,
    Candidate,
    Running,
    by_class,
    follows_time,
    objective_named,
)
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.expression import parse
from parsl_freetrain.core.model.types import Efficiency, ScalingCurve
from tests.support.properties import holds_for

CURVE = ScalingCurve.from_points({1: 10.0, 2: 19.0, 4: 36.0})
WORDS = 'rate', 'nodes', ' if ', ' else ', 'min', 'sqrt', '1e308', ' for ', ' in ', 'lambda:'


def candidate(
    low: int = 1,
    high: int = 6,
    priority: float = 1.0,
    deadline_s: float | None = None,
    remaining: float | None = None,
    efficiency: Efficiency | None = None,
    curve: ScalingCurve = CURVE,
    waited_s: float = 0.0,
) -> Candidate:
    return Candidate('a', curve, low, high, priority, deadline_s, remaining, efficiency, waited_s)


def worths(name: str, of: Candidate) -> list[float]:
    """At 0..max_nodes."""
    curve = objective_named(name)(of)
    return [curve.rate_at(n) for n in range(of.max_nodes + 1)]


def test_throughput_is_the_curve_itself() -> None:
    assert worths('throughput', candidate()) == [0, 10, 19, 27.5, 36, 36, 36]


def test_a_deadline_is_worth_what_is_done_by_it_and_speed_beyond_only_a_little() -> None:
    # 1900 samples in 100 s: 19 per second suffice, which 2 nodes have
    assert worths(
        'deadline', candidate(deadline_s=100.0, remaining=1900.0, priority=2.0)
    ) == pytest.approx(
        [0] + [2 * (min(1.0, r * 100 / 1900) + 0.01 * r / 36) for r in (10, 19, 27.5, 36, 36, 36)]
    )
    none_or_past = [0] + [0.01 * r / 36 for r in (10, 19, 27.5, 36, 36, 36)]
    assert worths('deadline', candidate()) == pytest.approx(none_or_past)
    past = worths('deadline', candidate(deadline_s=-5.0, remaining=10.0))
    assert past == pytest.approx(none_or_past)
    past = worths('deadline', candidate(deadline_s=0.0, remaining=10.0))
    assert past == pytest.approx(none_or_past)
    with pytest.raises(BadInput, match=r"'a' has a deadline_s but no remaining_samples"):
        worths('deadline', candidate(deadline_s=5.0))


def test_goodput_is_exact_between_the_points_of_both_curves() -> None:
    efficiency = Efficiency((2, 4), (1.0, 0.5))
    assert worths('goodput', candidate(efficiency=efficiency)) == pytest.approx(
        [0, 10, 19, 27.5 * 0.75, 18, 18, 18]
    )
    assert worths('goodput', candidate()) == worths('throughput', candidate())


def test_fair_goodput_charges_a_restart_by_age_and_by_what_is_left() -> None:
    assert worths('fair_goodput', candidate()) == pytest.approx(
        [0, *(1.1 - s**-0.5 for s in (1, 1.9, 2.75, 3.6, 3.6, 3.6))]
    )
    here = Running(2, '', restart_s=30.0, age_s=100.0, lost_s=30.0)
    held = replace(candidate(remaining=600.0), running=here)

    def charged(left_s: float) -> float:
        return (100 + left_s - 30) / (100 + left_s + 30) * left_s / (left_s + 30)

    three, four = (charged(600 / r) * r / 10 for r in (27.5, 36))
    assert worths('fair_goodput', held)[2:5] == pytest.approx(
        [1.1 - 1.9**-0.5, max(0, 1.1 - three**-0.5), max(0, 1.1 - four**-0.5)]
    )
    # On another class as many nodes are charged, too.
    slow = ScalingCurve.from_points({1: 5.0, 4: 20.0})
    held = replace(held, running=replace(here, node_class='fast'))
    on = dict(by_class(METRICS['fair_goodput'], held, [('fast', CURVE), ('slow', slow)]))
    assert on['fast'].rate_at(2) == pytest.approx(1.1 - 3.8**-0.5)
    assert on['slow'].rate_at(2) == max(0.0, 1.1 - (2 * charged(60)) ** -0.5)
    # Where the trainer is as fast on every class, its class does not matter.
    assert worths('fair_goodput', held)[2] == pytest.approx(1.1 - 1.9**-0.5)
    young = replace(held, running=replace(here, age_s=20.0, lost_s=0.0), remaining_samples=None)
    assert worths('fair_goodput', young) == worths('fair_goodput', candidate())
    assert follows_time('fair_goodput')
    # Where it is not known what is left, the age counts for the life.
    unknown = replace(held, remaining_samples=None, running=replace(here, node_class=''))
    assert worths('fair_goodput', unknown)[4] == pytest.approx(1.1 - (3.6 * 70 / 130) ** -0.5)


def test_a_young_trainer_with_hours_to_go_grows_to_a_count_that_is_a_third_faster() -> None:
    """Charged by its age alone, it would stay: 50 min old, a restart of 250 s, 750 s lost."""
    curve = ScalingCurve.from_points({8: 19.3, 16: 25.8})
    here = Running(8, '', restart_s=250.0, age_s=3000.0, lost_s=750.0)
    net = replace(candidate(remaining=25.8 * 16_000), curve=curve, min_nodes=8, max_nodes=16)
    worth = METRICS['fair_goodput'](replace(net, running=here))
    assert worth.rate_at(16) > worth.rate_at(8)
    slow = ScalingCurve.from_points({8: 19.3, 16: 5e-324})
    assert METRICS['fair_goodput'](replace(net, running=here, curve=slow)).rate_at(16) == 0.0
    unknown = METRICS['fair_goodput'](replace(net, running=here, remaining_samples=None))
    assert unknown.rate_at(16) < unknown.rate_at(8)


def test_expressions() -> None:
    for text, expected in (
        ('rate', [0, 10, 19, 27.5, 36]),
        ('  rate / rate1 * priority ', [0, 2, 3.8, 5.5, 7.2]),
        ('min(rate, 20) + max(nodes, 2) / 1e3', [0, 10.002, 19.002, 20.003, 20.004]),
        ('sqrt(rate * 10) if nodes <= 2 else 2 ** nodes', [0, 10, math.sqrt(190), 8, 16]),
        ('log(1 + rate)', [0, *(math.log(1 + r) for r in (10, 19, 27.5, 36))]),
        ('rate * (1 < nodes < 4)', [0, 0, 19, 27.5, 0]),
        ('-(-rate) - +1', [0, 9, 18, 26.5, 35]),
        ('rate if deadline_s > 1e300 else 0', [0, 10, 19, 27.5, 36]),
        ('efficiency + waited_s * 0 + min_nodes', [0, 2, 2, 2, 2]),
        ('-nodes ** 2 + 20', [0, 19, 16, 11, 4]),
    ):
        assert worths(text, candidate(high=4, priority=2.0)) == pytest.approx(expected)


def test_whatever_is_not_arithmetic_over_the_fields_is_refused() -> None:
    for text, says in (
        ('rate * qos', "column 8: there is no field 'qos'"),
        ('rate.real', 'column 1: rate.real is not allowed'),
        ('rate + __import__("os").system("true")', 'is not allowed'),
        ('abs(rate)', 'column 1: abs(rate) is not allowed'),
        ('rate[0]', 'rate[0] is not allowed'),
        ('rate and 1', 'rate and 1 is not allowed'),
        ('min(*[1, 2])', 'is not allowed'),
        ('max(rate, key=1)', 'is not allowed'),
        ('max(rate)', 'max takes 2 to 20 arguments and got 1'),
        ('sqrt(1, 2)', 'sqrt takes 1 argument and got 2'),
        ('min + 1', "there is no field 'min'"),
        ('True + 1', 'True is not a number'),
        ('"9" * 9', "'9' is not a number"),
        ('9' * 400, 'the number is too large'),
        ('1e999', 'the number is too large'),
        ('rate +', 'column'),
        ('rate; rate', 'column 5'),
        ('rate\n+ 1', 'column'),
        ('\0', 'cannot be'),
        ('(' * 90 + 'rate' + ')' * 90 + '*', 'column'),
        ('-' * 300 + 'rate', 'nested too deeply'),
        ('rate' + ' + rate' * 100, 'nested too deeply'),
        ('rate' + ' ' * 1000, '1004 characters'),
        ("rate + 'é' + x", "column 8: 'é' is not a number"),
    ):
        with pytest.raises(BadInput) as caught, warnings.catch_warnings():
            warnings.simplefilter('ignore')
            objective_named(text)
        sentence = str(caught.value)
        assert says in sentence
        assert '\n' not in sentence
        assert 'characters' in sentence or all(field in sentence for field in FIELDS)


def test_a_worth_that_cannot_be_maximised_names_the_trainer_and_the_count() -> None:
    for text, says in (
        ('9**9**9', "'a': the objective '9**9**9' has no value at 1 node (math range error)"),
        ('rate / (nodes - 2)', 'the objective is -10 at 1 node'),
        ('(0 - 8) ** 0.5', 'has no value at 1 node'),
        ('sqrt(2 - nodes)', 'has no value at 3 nodes'),
        ('10 - 4 * nodes', 'the objective is -2 at 3 nodes'),
        ('deadline_s', 'the objective is inf at 1 node'),
        ('deadline_s - deadline_s', 'the objective is nan at 1 node'),
        ('1e19', 'from 0 to 1e+18'),
        ('rate / remaining_samples', "'a' has no remaining_samples"),
    ):
        with pytest.raises(BadInput) as caught:
            worths(text, candidate())
        assert says in str(caught.value)
        assert "'a'" in str(caught.value)


@holds_for(
    st.dictionaries(st.integers(1, 9), st.just(0.0) | st.floats(1e-3, 1e6), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 8),
    st.floats(0, 100),
    st.none() | st.floats(-100, 1e4),
    st.floats(1, 1e9),
    st.sampled_from(sorted(METRICS)),
    tries=100,
)
def test_every_objective_gives_a_curve_that_can_be_maximised(
    points: dict[int, float],
    low: int,
    more: int,
    priority: float,
    deadline_s: float | None,
    remaining: float,
    name: str,
) -> None:
    efficiency, curve = Efficiency((1, 5), (1.0, 0.25)), ScalingCurve.from_points(points)
    of = candidate(low, low + more, priority, deadline_s, remaining, efficiency, curve)
    curve = objective_named(name)(of)
    assert curve.rate_at(0) == 0
    rates = [curve.rate_at(n) for n in range(of.max_nodes + 3)]
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)


@holds_for(
    st.text(max_size=30)
    | st.lists(st.sampled_from([*WORDS, *'()+-*/<=,2.["']), max_size=12).map(''.join),
    tries=150,
)
def test_any_text_is_either_a_formula_or_refused_in_a_sentence(text: str) -> None:
    refusal, value = '', 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            expression = parse(text, FIELDS)
        value = expression.value(dict.fromkeys(FIELDS, 2.0))
    except BadInput as error:
        refusal = str(error)
    except (ArithmeticError, ValueError):
        pass
    assert '\n' not in refusal
    assert isinstance(value, float)
