"""When nodes are free: a table that is kept agrees with one that is looked up anew each time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.sites.batch.node_shares import NodeCalendar

NOW = 10.0
times = st.sampled_from((0.0, 10.0, 11.0, 12.5, 15.0, 20.0, math.inf))
some_nodes = st.integers(0, 31)


@given(
    st.dictionaries(times, some_nodes),
    st.lists(st.tuples(times, times, some_nodes), max_size=4),
    some_nodes,
    st.integers(1, 3),
    some_nodes,
    st.sampled_from((1.0, 2.5, 8.0, math.inf)),
)
def test_the_first_time_at_which_enough_nodes_are_free(
    free_from: dict[float, int],
    taken: list[tuple[float, float, int]],
    eligible: int,
    count: int,
    named: int,
    length_s: float,
) -> None:
    calendar = NodeCalendar(NOW, free_from)
    for begin, end, members in taken:
        calendar.first_time(eligible, 1, 0, 1.0)  # what it finds is remembered
        calendar.take(begin, end, members)

    def free(time: float) -> int:
        found = 0
        for since, members in free_from.items():
            found |= members if since <= time else 0
        for begin, end, members in taken:
            if begin < time + length_s and max(time, begin) < end:
                found &= ~members
        return found & eligible

    candidates = {NOW, *free_from, *(time for begin, end, _ in taken for time in (begin, end))}
    expected = [
        (time, free(time))
        for time in sorted(candidates)
        if NOW <= time < math.inf and free(time).bit_count() >= count and not named & ~free(time)
    ]
    assert calendar.first_time(eligible, count, named, length_s) == (
        expected[0] if expected else (math.inf, 0)
    )
    assert calendar.free(eligible, NOW, length_s) == free(NOW)


def test_jobs_alike_are_not_each_looked_for_from_the_beginning() -> None:
    ends, jobs = 1000, 500
    calendar = NodeCalendar(NOW, {NOW + end: 1 << end for end in range(ends)})
    everywhere = (1 << ends) - 1
    for _ in range(jobs):
        begin, free = calendar.first_time(everywhere, 2, 0, 10.0)
        calendar.take(begin, math.inf, free)
    assert calendar.looks <= ends + 20 * jobs
