"""The replay's arithmetic: what is trained, what is lost, and where every node-second goes."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.result import PoolResult
from parsl_freetrain.replay.scenario import Scenario, constant_pool, replay
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer
from parsl_freetrain.replay.world import CurveLearning
from tests.support.properties import holds_for

LINEAR = ScalingCurve((0, 1, 8), (0.0, 10.0, 80.0))
ENDLESS = 10**9
Interval = tuple[str, float, float]


def trace_of(*intervals: Interval, end_s: float, known_until: tuple[float, ...] = ()) -> Trace:
    names = tuple(sorted({name for name, _, _ in intervals}))
    which, starts, ends = (np.array(column) for column in zip(*intervals, strict=True))
    nodes = np.array([names.index(name) for name in which])
    known = np.array(known_until or [math.inf] * len(intervals))
    return Trace(names, 0.0, end_s, starts, ends, nodes, known)


def trainer(
    name: str,
    low: int = 1,
    high: int = 8,
    total: int = ENDLESS,
    up_s: float = 3.0,
    down_s: float = 2.0,
    submit_s: float = 0.0,
    curve: ScalingCurve = LINEAR,
) -> ReplayTrainer:
    return ReplayTrainer(Trainer(name, low, high, total, curve, up_s, down_s), submit_s, curve)


def on_trace(trace: Trace, *trainers: ReplayTrainer, **more: Any) -> PoolResult:
    settings = ControllerSettings(
        **{k: more.pop(k) for k in list(more) if k in ControllerSettings.__struct_fields__}
    )
    result = replay(Scenario(trace, trainers, settings, **more))
    outcome = result.trace
    if result.efficiency_bound is not None and not outcome.done_s:
        assert result.efficiency is not None
        assert result.efficiency <= result.efficiency_bound + 1e-9
    assert outcome.node_s['stranded'] == 0
    assert sum(outcome.node_s.values()) == pytest.approx(outcome.idle_node_s)
    assert sum(outcome.samples_by_trainer.values()) == pytest.approx(outcome.samples)
    assert outcome.series.samples[-1] == pytest.approx(outcome.samples)
    return outcome


def spans(outcome: PoolResult) -> list[tuple[str, float, float, int]]:
    s = outcome.series
    times = s.span_start.tolist(), s.span_end.tolist()
    return list(zip(s.span_trainer, *times, s.span_nodes.tolist(), strict=True))


# Two trainers and three nodes, by hand


def test_growing_and_being_preempted_cost_seconds_of_the_rate_before() -> None:
    trace = trace_of(('a', 0, 1000), ('b', 100, 700), ('c', 100, 700), end_s=1000)
    outcome = on_trace(trace, trainer('net'))
    assert spans(outcome) == [('net', 0, 100, 1), ('net', 100, 700, 3), ('net', 700, 1000, 1)]
    grown, preempted = 3 * 10.0, 2 * 30.0  # up_s at 1 node, down_s at 3
    assert (outcome.rescaled, outcome.lost_rescale) == (1, grown)
    assert (outcome.preempted, outcome.lost_preemption) == (1, preempted)
    assert outcome.samples == pytest.approx(100 * 10 + 600 * 30 + 300 * 10 - grown - preempted)
    assert outcome.idle_node_s == outcome.used_node_s == 1000 + 2 * 600
    assert outcome.node_s['rescaling'] == 3 * 1
    assert outcome.node_s['lost_to_preemption'] == 2 * 3


def test_two_trainers_share_three_nodes_and_a_completion_frees_its_nodes_at_once() -> None:
    # 'short' can use one node; 1,000 samples take it 100 s. Then 'long' grows from 2 to 3 nodes.
    trace = trace_of(('a', 0, 500), ('b', 0, 500), ('c', 0, 500), end_s=500)
    outcome = on_trace(trace, trainer('short', high=1, total=1000), trainer('long'))
    assert spans(outcome) == [('short', 0, 100, 1), ('long', 0, 100, 2), ('long', 100, 500, 3)]
    assert outcome.done_s == {'short': 100.0}
    samples = {'short': 1000.0, 'long': pytest.approx(100 * 20 + 400 * 30 - 3 * 20)}
    assert outcome.samples_by_trainer == samples
    assert (len(outcome.done_s), outcome.finished_s) == (1, None)


def test_a_loss_delays_completion() -> None:
    trace = trace_of(('a', 0, 900), ('b', 0, 50), end_s=900)
    outcome = on_trace(trace, trainer('net', total=2000))
    # 50 s x 20 = 1,000, 2 s x 20 lost, the remaining 1,040 at 10 samples/s.
    assert outcome.done_s == {'net': 154.0}
    assert outcome.samples == 2000
    assert outcome.node_s['no_use'] == 900 - 154


def test_one_preemption_charge_per_trainer_and_instant_however_many_nodes_go() -> None:
    trace = trace_of(('a', 0, 1000), ('b', 0, 300), ('c', 0, 300), ('d', 300, 1000), end_s=1000)
    outcome = on_trace(trace, trainer('net'))
    # Two nodes of three leave and another one joins: one charge, and going on with 2 of them is no
    # rescale on top of it.
    assert spans(outcome) == [('net', 0, 300, 3), ('net', 300, 1000, 2)]
    assert (outcome.preempted, outcome.lost_preemption, outcome.rescaled) == (1, 60.0, 0)
    assert outcome.samples == 300 * 30 + 700 * 20 - 60


def test_all_nodes_that_leave_at_once_are_gone() -> None:
    trace = trace_of(('a', 0, 1000), ('b', 0, 100), ('c', 0, 100), ('d', 0, 100), end_s=1000)
    outcome = on_trace(trace, trainer('x', high=2), trainer('y', high=2), trainers_at_a_time=2)
    assert outcome.series.idle.tolist() == [4, 1, 1]
    assert outcome.series.used.tolist() == [4, 1, 0]
    assert outcome.preempted == 2


def test_trainers_have_their_turn_in_the_order_of_submission() -> None:
    trace = trace_of(('a', 0, 400), ('b', 0, 400), end_s=400)
    early = trainer('before the window', high=1, total=500, submit_s=-7)
    both = trainer('late', high=1, submit_s=50), trainer('first', high=1, total=1000)
    outcome = on_trace(trace, *both, early, trainers_at_a_time=1)
    first, late = ('first', 50, 150, 1), ('late', 150, 400, 1)
    assert spans(outcome) == [('before the window', 0, 50, 1), first, late]


# What is known of the ends


def test_a_known_end_is_no_preemption_and_is_allowed_for() -> None:
    known = trace_of(('a', 0, 400), ('b', 0, 100), end_s=400, known_until=(math.inf, 100.0))
    outcome = on_trace(known, trainer('net'), known_ends=True)
    assert spans(outcome) == [('net', 0, 100, 2), ('net', 100, 400, 1)]
    assert (outcome.preempted, outcome.rescaled) == (0, 1)
    assert outcome.samples == 100 * 20 + 300 * 10 - 2 * 20
    assert on_trace(known, trainer('net')).preempted == 1


def test_a_node_that_goes_soon_is_not_worth_a_rescale() -> None:
    # One more node for 20 s is worth 200 samples; to grow costs 60, to shrink again 3 x 80.
    intervals = [(name, 0.0, 500.0) for name in 'abcdefgh'[:7]] + [('z', 100.0, 120.0)]
    known = trace_of(*intervals, end_s=500, known_until=(*[math.inf] * 7, 120.0))
    net = trainer('net', up_s=1.0, down_s=3.0)
    told, untold = on_trace(known, net, known_ends=True), on_trace(known, net)
    assert told.node_s['not_worth'] == pytest.approx(20)
    assert told.samples == 500 * 70
    assert untold.samples == 500 * 70 + 20 * 10 - 70 - 3 * 80
    # Another trainer has nothing to lose by it.
    both = net, trainer('other', high=1, submit_s=100)
    assert on_trace(known, *both, trainers_at_a_time=2, known_ends=True).node_s['not_worth'] == 0


def test_nodes_about_to_go_are_left_alone() -> None:
    known = trace_of(('a', 0, 4), ('b', 0, 50), end_s=100, known_until=(4.0, 50.0))
    outcome = on_trace(known, trainer('net'), known_ends=True, min_hole_s=5.0)
    assert spans(outcome) == [('net', 0, 50, 1)]
    assert outcome.node_s['too_short'] == 4
    free = on_trace(known, trainer('net', down_s=0.0), known_ends=True, min_hole_s=3.0)
    assert free.node_s['too_short'] == 0


def test_ends_of_which_nothing_is_known_cannot_be_used() -> None:
    with pytest.raises(BadInput, match='Nothing is known of the ends'):
        on_trace(trace_of(('a', 0, 4), end_s=9), trainer('net'), known_ends=True)


# Settings


def test_costs_can_be_scaled_and_replaced() -> None:
    trace = trace_of(('a', 0, 100), ('b', 0, 50), end_s=100)
    cheap: list[dict[str, Any]] = [{'rescale_cost': 0.25}, {'rescale_cost': 0.0}]
    every = [{}, *cheap, {'rescale_down_s': 1.0}]
    losses = [on_trace(trace, trainer('net'), **costs).lost_preemption for costs in every]
    assert losses == [40.0, 10.0, 0.0, 20.0]


# Node classes

FAST, SLOW = (ScalingCurve((0, 8), (0.0, 8 * rate)) for rate in (10.0, 4.0))
THREE = trace_of(('a', 0, 1000), ('b', 0, 1000), ('c', 0, 600), end_s=1000)
UNEQUAL = replace(THREE, node_classes=('fast', 'slow', 'slow'))


def on_classes(name: str, **curves: ScalingCurve) -> ReplayTrainer:
    trainer = Trainer(name, 1, 8, ENDLESS, None, 3.0, 2.0, class_curves=tuple(curves.items()))
    return ReplayTrainer(trainer, 0.0)


def test_a_trainer_uses_nodes_of_one_class_at_a_time_at_the_speed_of_that_class() -> None:
    both = on_classes('both', fast=FAST, slow=SLOW)
    outcome = on_trace(UNEQUAL, both)
    assert spans(outcome) == [('both', 0, 1000, 1)]
    assert (outcome.samples, outcome.node_s['no_use']) == (10_000, 1600)
    outcome = on_trace(UNEQUAL, both, on_classes('other', slow=SLOW))
    assert spans(outcome) == [('other', 0, 600, 2), ('both', 0, 1000, 1), ('other', 600, 1000, 1)]
    assert outcome.samples == 10_000 + 600 * 8 - 2 * 8 + 400 * 4
    with pytest.raises(BadInput, match="names? the node class 'tpu'; the trace has fast, slow"):
        on_trace(UNEQUAL, on_classes('net', tpu=FAST))


def test_each_class_has_its_own_constant_pool_and_its_own_learned_curve() -> None:
    assert constant_pool(UNEQUAL).node_classes == ('fast', 'slow', 'slow')
    two = replace(trace_of(('a', 0, 1000), ('b', 0, 1000), end_s=1000), node_classes=('f', 's'))
    both = on_classes('both', f=FAST, s=SLOW)
    result = replay(Scenario(two, (both,), by_file=False, learning=CurveLearning()))
    assert result.oracle is not None
    # One try of the slow class, which is given up after the first measurement.
    assert result.trace.samples > 0.95 * result.oracle.samples


# The constant pool


def test_a_constant_trace_has_efficiency_1() -> None:
    trace = constant_pool(trace_of(('a', 0, 1000), end_s=1000), 5)
    result = replay(Scenario(trace, (trainer('x'), trainer('y', total=3000)), ControllerSettings()))
    assert (result.efficiency, result.compared, result.equivalent_nodes) == (1.0, 'samples', 5.0)
    assert result.as_json()['static_samples'] == result.as_json()['samples']


def test_twice_the_nodes_for_half_the_time() -> None:
    concave = ScalingCurve((1, 2), (10.0, 15.0))
    trace = trace_of(('a', 0, 500), ('b', 0, 500), end_s=1000)
    result = replay(Scenario(trace, (trainer('net', high=2, curve=concave),), ControllerSettings()))
    assert result.equivalent_nodes == 1
    assert result.efficiency == pytest.approx((500 * 15 - 2 * 15) / (1000 * 10))


def test_when_the_trainers_run_out_times_are_compared() -> None:
    trace = trace_of(('a', 0, 1000), ('b', 500, 1000), ('c', 0, 500), end_s=1000)
    net = trainer('net', total=9000, up_s=0.0, down_s=0.0)
    result = replay(Scenario(trace, (net,), ControllerSettings()))
    assert result.compared == 'time'
    assert result.efficiency == pytest.approx(1.0)
    late = (('b', 600, 1000), ('c', 600, 1000), ('d', 600, 1000))
    slower = trace_of(('a', 0, 1000), *late, end_s=1000)
    result = replay(
        Scenario(slower, (trainer('net', total=10000, up_s=0.0, down_s=0.0),), ControllerSettings())
    )
    # On the trace 600 s x 10 + 100 s x 40; on 2.2, rounded 2, constant nodes 500 s.
    assert result.efficiency == pytest.approx(500 / 700)


def test_without_anything_to_compare_with_there_is_no_efficiency() -> None:
    trace = trace_of(('a', 0, 10), end_s=1000)
    result = replay(Scenario(trace, (trainer('net'),), ControllerSettings()))
    assert (result.efficiency, result.constant.samples) == (None, 0.0)


# Whatever the trace

BENT = ScalingCurve((1, 2, 4), (10.0, 17.0, 27.0)), ScalingCurve((1, 3, 4), (5.0, 6.0, 90.0))
CURVES = (LINEAR, *BENT)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    intervals: list[Interval] = []
    for node in range(draw(st.integers(1, 6))):
        times = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=6)))
        pairs = zip(times[::2], times[1::2], strict=False)
        intervals += [(f'n{node}', 10.0 * a, 10.0 * b) for a, b in pairs]
    ends = tuple(draw(st.sampled_from([math.inf, end, end + 30])) for _, _, end in intervals)
    return trace_of(*intervals, end_s=600.0, known_until=ends)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[ReplayTrainer, ...]:
    return tuple(
        trainer(
            f't{i}',
            1,
            draw(st.integers(1, 4)),
            draw(st.sampled_from([200, 3000, ENDLESS])),
            submit_s=draw(st.sampled_from([0.0, 55.0])),
            curve=draw(st.sampled_from(CURVES)),
        )
        for i in range(draw(st.integers(1, 3)))
    )


@holds_for(traces(), mixes(), st.booleans(), st.sampled_from([None, 1]), tries=60)
def test_nothing_appears_or_disappears(
    trace: Trace, trainers: tuple[ReplayTrainer, ...], known_ends: bool, at_a_time: int | None
) -> None:
    known_ends = known_ends and bool(np.isfinite(trace.known_until).any())
    scenario = Scenario(
        trace, trainers, ControllerSettings(trainers_at_a_time=at_a_time), known_ends=known_ends
    )
    result = replay(scenario)
    outcome, series = result.trace, result.trace.series
    assert outcome.idle_node_s == pytest.approx(trace.idle_node_s(known_ends))
    assert sum(outcome.node_s.values()) == pytest.approx(outcome.idle_node_s)
    assert outcome.node_s['stranded'] == 0
    assert (series.used <= series.idle).all()
    width = series.span_nodes * (series.span_end - series.span_start)
    assert width.sum() == pytest.approx(outcome.used_node_s)
    curves = {t.trainer.name: t.trainer.curve for t in trainers}
    gross = sum(
        (end - start) * curve.rate_at(nodes)
        for name, start, end, nodes in spans(outcome)
        if (curve := curves[name])
    )
    assert outcome.samples == pytest.approx(gross - outcome.lost_preemption - outcome.lost_rescale)
    totals = {t.trainer.name: t.trainer.total_samples or 0 for t in trainers}
    assert all(outcome.samples_by_trainer[name] <= total for name, total in totals.items())
    again = replay(scenario).trace
    assert spans(again) == spans(outcome)
    assert again.samples_by_trainer == outcome.samples_by_trainer


@holds_for(traces(), mixes(), st.integers(1, 599), tries=40)
def test_empty_moments_do_not_matter(
    trace: Trace, mix: tuple[ReplayTrainer, ...], at_s: int
) -> None:
    endless = [replace(t.trainer, total_samples=ENDLESS) for t in mix]
    trainers = tuple(replace(t, submit_s=0.0, trainer=e) for t, e in zip(mix, endless, strict=True))
    settings = ControllerSettings(trainers_at_a_time=len(trainers))
    one = replay(Scenario(trace, trainers, settings)).trace
    never = trainer('never has its turn', submit_s=at_s)
    two = replay(Scenario(trace, (*trainers, never), settings)).trace
    assert len(set(two.series.times.tolist())) >= len(set(one.series.times.tolist()))
    assert spans(two) == spans(one)
    assert two.samples == pytest.approx(one.samples)


def test_a_replay_stops_a_trainer_whose_budget_is_spent() -> None:
    there = trace_of(('n0', 0.0, 100.0), ('n1', 0.0, 100.0), end_s=100.0)
    outcome = on_trace(there, trainer('a', high=2), budgets={'trainer a': 100.0})
    assert spans(outcome) == [('a', 0.0, 50.0, 2)]
