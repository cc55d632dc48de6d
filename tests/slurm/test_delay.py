"""The arithmetic of the experiment finds a delay, and accounts for every idle node-second."""

from __future__ import annotations

import pytest

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import Outcome, Ran
from tests.slurm.mix import Ordinary, arriving, known


def outcome(
    *starts: float, blocks: tuple[Ran, ...] = (), trained: tuple[tuple[str, float, float], ...] = ()
) -> Outcome:
    return Outcome(
        2,
        tuple(Ran(start, start + 10.0, ('a',)) for start in starts),
        blocks,
        {'checkpointing': 1.0, 'lost': 2.0},
        trained,
    )


def test_a_job_that_starts_later_than_in_every_run_without_is_delayed() -> None:
    alone, again = outcome(0, 12, 20), outcome(1, 10, 20)
    assert scatter_s(alone, again) == 2
    assert delays_s([alone, again], outcome(0, 13, 80)) == [-1, 1, 60]


def test_idle_seconds_add_up() -> None:
    idle = idle_of(
        outcome(
            0,
            10,
            blocks=(Ran(-5, 12, ('b',)), Ran(15, 40, ('b',))),
            trained=(('b', 2, 12), ('b', 16, 40)),
        )
    )
    assert idle.idle == 2 * 20 - 2 * 10
    assert idle.trained == 10 + 4 - 3
    assert idle.trained + idle.checkpointing + idle.lost + idle.other + idle.outside == idle.idle
    assert (idle.other, idle.outside) == (3, 3)
    assert idle.share == 11 / 20


@pytest.mark.parametrize('mix', [known(396, 4, 4, 3), arriving(8, 4, 9, 150.0, 30.0)])
def test_mixes_have_narrow_and_wide_jobs_that_keep_their_limits(mix: list[Ordinary]) -> None:
    assert {1, 4} <= {job.nodes for job in mix}
    assert all(job.run_s < 60 * job.minutes for job in mix)
