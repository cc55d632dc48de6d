"""A solver that remembers the last problem answers the next one as if it were the first."""

from dataclasses import replace

from hypothesis import strategies as st

from parsl_freetrain.core.allocation.problem import Answer, Bid, Problem
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.types import ScalingCurve
from tests.support.properties import holds_for

CURVES = (
    ScalingCurve((1, 8), (10.0, 80.0)),
    ScalingCurve((1, 2, 4), (10.0, 17.0, 27.0)),
    ScalingCurve((1, 3, 4), (5.0, 6.0, 90.0)),
)
BIDS = st.builds(
    lambda low, more, held, curve, fixed: Bid(
        '', low, low + more, min(held, low + more), 3.0, 2.0, curve, fixed=fixed
    ),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from([0, 0, 1, 2, 5]),
    st.sampled_from(CURVES),
    st.sampled_from([False, False, False, True]),
)
CHANGES = st.tuples(
    st.integers(4, 30),
    st.lists(st.tuples(st.integers(0, 4), BIDS), min_size=1, max_size=2),
    st.sampled_from(['same', 'same', 'same', 'one more', 'one less']),
    st.sampled_from([120.0, 120.0, 120.0, 60.0]),
)


def timeless(answer: Answer) -> Answer:
    return replace(answer, seconds=0.0)


@holds_for(
    st.lists(BIDS, min_size=1, max_size=5), st.lists(CHANGES, min_size=2, max_size=8), tries=150
)
def test_what_was_asked_before_does_not_matter(
    first: list[Bid], changes: list[tuple[int, list[tuple[int, Bid]], str, float]]
) -> None:
    allocator = DpAllocator()
    bids = [replace(bid, name=f't{j}') for j, bid in enumerate(first)]
    for nodes, changed, size, horizon_s in changes:
        if size == 'one more':
            bids.append(replace(first[0], name=f't{len(bids)}'))
        elif size == 'one less':
            bids = bids[:-1]
        for j, bid in changed:
            if bids:
                bids[j % len(bids)] = replace(bid, name=bids[j % len(bids)].name)
        problem = Problem(horizon_s, nodes, tuple(bids))
        assert timeless(allocator.allocate(problem)) == timeless(DpAllocator().allocate(problem))
