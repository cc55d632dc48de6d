"""How often the ranks agree on what to do next, and that they do so at the same steps."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from parsl_freetrain.training.comm.peers import EVERY_S, Agreed, Agreement, Peers, steps_between

DIFFERENT, GO_ON, SAVE = Agreed.DIFFERENT, Agreed.GO_ON, Agreed.SAVE
SPOILT, STOP = Agreed.SPOILT, Agreed.STOP


class Pair(Peers):
    """This rank, and another one of which the test says what it wishes and how slow it is."""

    world_size = 2

    def __init__(self) -> None:
        self.other = (GO_ON, -10_000, 7, -7)
        self.asked = 0

    def all_reduce_max(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        self.asked += 1
        other = self.other
        return lambda: tuple(map(max, numbers, other))


def test_several_times_a_second_and_more_often_when_the_nodes_go_soon() -> None:
    for step_s, steps in ((0.0, 1), (0.008, 31), (0.05, 5), (0.2, 1), (60.0, 1)):
        assert steps_between(step_s) == steps
    for time_left_s, steps in ((1e6, 250), (10.0, 250), (2.0, 50), (0.01, 1), (-1.0, 1)):
        assert steps_between(0.001, time_left_s) == steps


def trained(
    pair: Pair, steps: int, step_s: float, wish: Callable[[], int] = lambda: GO_ON
) -> tuple[list[int], Agreement]:
    now = 0.0

    def clock() -> float:
        return now

    agreement = Agreement(pair, clock, lambda: 7)
    decisions = []
    for _ in range(steps):
        now += step_s
        decisions.append(agreement.after_step(wish, lambda: 1e6))
    return decisions, agreement


def test_the_cadence_follows_the_slowest_rank() -> None:
    pair = Pair()
    _, agreement = trained(pair, 1000, 0.001)
    assert 4 <= pair.asked <= 6
    assert agreement.delay == pytest.approx(EVERY_S / 0.001, abs=2)
    pair = Pair()
    pair.other = (GO_ON, -5, 7, -7)
    _, agreement = trained(pair, 1000, 0.001)
    assert agreement.delay == 6


def test_a_wish_of_either_rank_is_decided_within_the_delay() -> None:
    for mine, other in ((STOP, GO_ON), (GO_ON, STOP), (SAVE, STOP), (STOP, SAVE)):
        pair = Pair()
        pair.other = (other, -10_000, 7, -7)
        decisions, agreement = trained(pair, 100, 0.01, lambda mine=mine: mine)  # type: ignore[misc]
        found = [i for i, decision in enumerate(decisions) if decision == STOP]
        assert found[0] <= agreement.delay
        assert max(b - a for a, b in pairwise(found)) <= agreement.delay


def test_what_must_be_the_same_and_is_not_takes_precedence() -> None:
    for other in (6, 8):
        pair = Pair()
        pair.other = (SPOILT, -10_000, other, -other)
        assert max(trained(pair, 10, 0.01)[0]) == DIFFERENT


def test_alone_nobody_has_to_be_asked() -> None:
    agreement = Agreement(Peers())
    assert agreement.delay == 0
    wishes = iter((GO_ON, STOP))
    decided = [agreement.after_step(lambda: next(wishes), lambda: 1.0) for _ in range(2)]
    assert decided == [GO_ON, STOP]
