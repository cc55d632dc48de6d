"""What earlier runs have used of a budget."""

from pathlib import Path

import pytest

from parsl_freetrain.core.model.events import (
    BlockClosed,
    BlockOpened,
    BlockRequeued,
    BlockStarted,
    Ending,
    Event,
    FragmentEnded,
    FragmentLaunched,
    RunBegan,
    RunEnded,
    TrainerSubmitted,
)
from parsl_freetrain.core.model.types import BlockRequest, Charge, Trainer
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.journal.usage import charged, used_node_s


def write(path: Path, run: str, at: float, *events: Event) -> None:
    journal = JournalWriter(path)
    journal.begin_run(RunBegan(at, run))
    for event in events:
        journal.take(event)
    journal.close()


def test_fragments_of_all_runs_count_for_their_owners(tmp_path: Path) -> None:
    path = tmp_path / 'ledger'
    assert used_node_s(path) == {}
    a, b = Trainer('a', 1, 4, user='anna', group='lab'), Trainer('b', 1, 4, group='lab')
    for run, begin in (('first', 1000.0), ('second', 2000.0)):
        write(
            path,
            run,
            begin,
            TrainerSubmitted(begin, a),
            TrainerSubmitted(begin, b),
            FragmentLaunched(begin, 'a', 1, ('n0', 'n1'), None, 0),
            FragmentLaunched(begin, 'b', 1, ('n2',), None, 0),
            FragmentEnded(begin + 50, 'a', 1, 0, Ending.STOPPED),
            # In the first run, b's fragment is cut off with its run.
            RunEnded(begin + 80, 'finished')
            if run == 'first'
            else FragmentEnded(begin + 20, 'b', 1, 0, Ending.STOPPED),
        )
    used = used_node_s(path)
    assert used['user anna'] == used['trainer a'] == pytest.approx(2 * 2 * 50)
    assert used['trainer b'] == pytest.approx(80 + 20)
    assert used['group lab'] == used['total'] == pytest.approx(200 + 100)


def test_blocks_of_all_runs_are_charged(tmp_path: Path) -> None:
    path = tmp_path / 'ledger'
    assert charged(path) == 0.0
    hourly = BlockRequest(2, 3600.0, charge=Charge(1.0), lasts_s=3600.0)
    for run in ('first', 'second'):
        write(
            path,
            run,
            0.0,
            BlockOpened(0.0, 'requeued', hourly),
            BlockStarted(20.0, 'requeued', 10.0),
            BlockRequeued(1810.0, 'requeued'),
            BlockStarted(2000.0, 'requeued', 2000.0),
            BlockClosed(3800.0, 'requeued'),
            BlockOpened(0.0, 'withdrawn', hourly),
            BlockClosed(900.0, 'withdrawn'),
            # Its end is not known: it may have lasted as long as it could.
            *([BlockOpened(4000.0, 'left', hourly)] if run == 'second' else []),
        )
    assert charged(path) == pytest.approx(2 * (2 * 0.5 + 2 * 0.5) + 2.0)
