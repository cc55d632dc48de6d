"""What the comparison with other systems reads from the log of a run."""

import itertools

import pytest

from tests.benchmarks.kills import figures, p95, repeated
from tests.benchmarks.versus.constants import BATCH
from tests.benchmarks.versus.machine import Step
from tests.benchmarks.versus.measures import ARRIVAL, RANK, Event, Run, next_step, work
from tests.benchmarks.versus.tables import ROWS, cell
from tests.benchmarks.versus.training import Batches

# Steps of 1 s: three on 3 ranks, a rank is killed in the fourth, which one survivor still ends; the
# training goes on at 8 s, from one step before, and has a fourth node from 11 s on.
KILLED, ARRIVED = Event(RANK, 3.5, 3), Event(ARRIVAL, 9.5, 4)


def steps(first: int, count: int, at: float, ranks: range, digest: str | None = None) -> list[Step]:
    return [
        Step(f'n{r}', 10 * int(at) + r, at + i, at + i + 0.9, 0.1 * i, BATCH * (first + i),
             len(ranks), digest)
        for i, r in itertools.product(range(count), ranks)
    ]  # fmt: skip


LOG = (
    *steps(0, 3, 0.0, range(3)),
    *steps(3, 1, 3.0, range(1)),
    *steps(3, 3, 8.0, range(3)),
    *steps(6, 2, 11.0, range(4)),
)
RUN = Run(-5.0, 13.0, 3, (KILLED, ARRIVED), LOG)


def test_a_step_that_had_begun_before_the_kill_is_not_the_next_one() -> None:
    assert next_step(RUN, KILLED) == pytest.approx(8.9 - 3.5)


def test_an_event_without_a_step_before_the_next_one_has_no_time() -> None:
    late = Event(RANK, 12.95, 4)
    assert next_step(Run(0.0, 14.0, 3, (late,), LOG), late) is None
    assert cell(ROWS['rank'], [None, None]) == 'not in time'
    assert cell(ROWS['rank'], [None, 2.0, 4.0]) == '3.00 (2.00 to 4.00), 1 of 3 not in time'


def test_steps_that_a_kill_repeats_are_those_that_had_ended() -> None:
    assert repeated(LOG, Event(RANK, 3.95, 3), 9.5) == 1  # that which one survivor ended
    assert repeated(LOG, KILLED, 9.5) == 0
    assert repeated(LOG, Event(RANK, 12.95, 4), 14.0) == 0
    assert figures([RUN, RUN], RANK) == {
        'kills': 2,
        'not in time': 0,
        'median': pytest.approx(5.4),
        'p95': pytest.approx(5.4),
        'max': pytest.approx(5.4),
        'most steps repeated': 0,
    }
    assert [p95(range(1, n + 1)) for n in (1, 2, 20, 100)] == [1, 2, 19, 95]


def test_samples_trained_again_count_once() -> None:
    done = work(RUN)
    assert (done.useful, done.repeated) == (8 * BATCH, BATCH)
    assert done.samples_per_s == pytest.approx(8 * BATCH / (13.0 - 0.9))
    assert done.goodput == pytest.approx(8 * 0.9 / (13.0 - 0.9))


def test_ranks_divide_a_batch_among_them() -> None:
    batches = Batches()
    whole = batches.part(BATCH, 0, 1)[0].tolist()
    parts = [batches.part(BATCH, rank, 3) for rank in range(3)]
    assert [row for x, _, _ in parts for row in x.tolist()] == whole
    assert sum(factor for _, _, factor in parts) == pytest.approx(3)
