from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.idle_schedule import Floats, IdleInterval, Schedule
from parsl_freetrain.sites.synthetic_schedule import generate
from tests.support.properties import holds_for
from tests.support.schedules import change_times

WEEK_S = 7 * 86400.0


@pytest.fixture(scope='module')
def large() -> Schedule:
    return generate(4734, WEEK_S, seed=3)


def cohorts(schedule: Schedule) -> list[Floats]:
    """Ends of the intervals that begin together, those at time 0 apart."""
    starts, first = np.unique(schedule.starts, return_index=True)
    return [
        ends
        for start, ends in zip(starts, np.split(schedule.ends, first[1:]), strict=True)
        if start > 0
    ]


def test_lengths_are_those_published(large: Schedule) -> None:
    whole = (large.starts > 0) & (large.ends < WEEK_S)
    lengths = (large.ends - large.starts)[whole]
    published = {5: 81, 10: 91, 25: 162, 50: 475, 75: 1397, 90: 3269, 95: 4723, 99: 9246}
    for percent, seconds in published.items():
        assert np.percentile(lengths, percent) == pytest.approx(seconds, rel=0.2), percent
    assert lengths.mean() == pytest.approx(1192, rel=0.1)
    assert lengths.min() >= 50


def test_cohorts_join_and_leave_as_published(large: Schedule) -> None:
    groups = cohorts(large)
    sizes = [len(group) for group in groups]
    assert np.percentile(sizes, 50) == pytest.approx(4, abs=1)
    assert np.percentile(sizes, 90) == pytest.approx(50, rel=0.2)
    assert np.percentile(sizes, 99) == pytest.approx(512, rel=0.3)
    together = []
    for ends in groups:
        if len(ends) > 1:
            counts = np.unique(ends, return_counts=True)[1]
            together.append((counts * (counts - 1)).sum() / (len(ends) * (len(ends) - 1)))
    assert np.mean(together) == pytest.approx(0.75, abs=0.03)


def test_events_are_as_far_apart_as_published(large: Schedule) -> None:
    gaps = np.diff(change_times(large))
    assert np.percentile(gaps, 50) == pytest.approx(30, rel=0.2)
    assert np.percentile(gaps, 90) == pytest.approx(111, rel=0.2)
    assert np.percentile(gaps, 99) == pytest.approx(354, rel=0.3)


def test_as_many_nodes_are_idle_as_asked_for(large: Schedule) -> None:
    small = [(generate(300, WEEK_S, 8, idle_share=share), 300, share) for share in (0.0827, 0.4)]
    for schedule, nodes, share in ((large, 4734, 0.0827), *small):
        assert np.sum(schedule.ends - schedule.starts) / (nodes * WEEK_S) == pytest.approx(
            share, rel=0.2
        )


def test_a_seed_means_the_same_schedule_in_every_release_and_another_seed_another() -> None:
    # Users record a seed in place of a schedule; whoever changes the generator changes their runs.
    schedule = generate(6, 100, seed=1, idle_share=0.6, time_factor=1 / 60)
    assert (len(schedule), round(np.sum(schedule.ends - schedule.starts), 6)) == (27, 447.526375)
    assert schedule != generate(6, 100, seed=2, idle_share=0.6, time_factor=1 / 60)
    assert set(generate(['x', 'y'], 50_000, seed=0, idle_share=0.5).nodes) <= {'x', 'y'}


@holds_for(
    tries=60,
    nodes=st.integers(1, 40),
    duration_s=st.floats(1, 50_000),
    seed=st.integers(0, 2**32),
    share=st.floats(0.01, 0.99),
    time_factor=st.floats(0.005, 10),
)
def test_intervals_are_in_order_and_within_the_duration(
    nodes: int, duration_s: float, seed: int, share: float, time_factor: float
) -> None:
    if duration_s / time_factor > 200_000:
        duration_s = 200_000 * time_factor
    schedule = generate(nodes, duration_s, seed, idle_share=share, time_factor=time_factor)
    per_node: dict[str, list[IdleInterval]] = {}
    for interval in schedule.intervals:
        assert 0 <= interval.start_s < interval.end_s <= duration_s
        per_node.setdefault(interval.node, []).append(interval)
    assert len(per_node) <= nodes
    for intervals in per_node.values():
        assert all(a.end_s < b.start_s for a, b in pairwise(intervals))


def test_bad_arguments_get_a_sentence() -> None:
    good: dict[str, Any] = {'nodes': 4, 'duration_s': 100, 'seed': 1}
    bad = {'nodes': (0, [], ['a', 'a']), 'duration_s': (0, float('inf')), 'idle_share': (0, 1)}
    for name, values in {**bad, 'time_factor': (0,)}.items():
        for value in values:
            with pytest.raises(BadInput, match=f'generated schedule: {name}'):
                generate(**{**good, name: value})
