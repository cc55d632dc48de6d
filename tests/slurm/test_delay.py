"""The arithmetic of the experiment finds a delay, and accounts for every idle node-second."""

from tests.slurm.delay import delays_s, idle_of, scatter_s
from tests.slurm.experiment import Outcome, Ran


def outcome(
    *starts: float, blocks: tuple[Ran, ...] = (), trained: tuple[tuple[str, float, float], ...] = ()
) -> Outcome:
    return Outcome(
        2,
        tuple(Ran(start, start + 10.0, ('node01',)) for start in starts),
        blocks,
        {'checkpointing': 1.0, 'lost': 2.0},
        trained,
    )


def test_a_job_that_starts_later_than_in_every_run_without_is_delayed() -> None:
    alone, again = outcome(0, 12, 20), outcome(1, 10, 20)
    assert scatter_s(alone, again) == 2
    assert scatter_s(alone, again, outcome(1, 9, 20)) == 3
    assert delays_s([alone, again], outcome(0, 13, 80)) == [-1, 1, 60]


def test_idle_seconds_add_up() -> None:
    idle = idle_of(
        outcome(
            0,
            10,
            blocks=(Ran(-5, 12, ('node02',)), Ran(15, 40, ('node02',))),
            trained=(('node02', 2, 12), ('node02', 16, 40)),
        )
    )
    assert idle.idle == 2 * 20 - 2 * 10
    assert idle.trained == 10 + 4 - 3
    assert idle.trained + idle.checkpointing + idle.lost + idle.other + idle.outside == idle.idle
    assert (idle.other, idle.outside) == (3, 3)
    assert idle.share == 11 / 20


def test_what_is_idle_for_more_than_a_minute_is_counted_apart() -> None:
    idle = idle_of(
        Outcome(
            1,
            (Ran(0, 10, ('node01',)), Ran(90, 100, ('node01',)), Ran(300, 310, ('node01',))),
            trained=(('node01', 20, 90), ('node01', 120, 200)),
            reserved=(Ran(140, 300, ('node01',)),),
        )
    )
    assert (idle.idle, idle.long, idle.in_long) == (80 + 40, 80, 70)
    assert idle.share_of_long == 70 / 80
