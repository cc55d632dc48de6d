"""What the ledger records for ``freetrain why``, and whether a run is running."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.core.model.events import StartFragment
from parsl_freetrain.ledger.decision_rows import PROBLEMS_KEPT
from parsl_freetrain.ledger.pending_rows import ALIVE_S
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.writer import Ledger

START = StartFragment('a', 1, ('n',), None, 0)


def decide(ledger: Ledger, at: float) -> None:
    ledger.decisions.decision(
        at=at,
        trigger='Tick',
        nodes=1,
        status='optimal',
        solver='dp',
        objective=1.0,
        seconds=0.0,
        staying=0.0,
        current={'a': 0},
        allocation={'a': 1},
        actions=[START],
    )


def test_the_newest_problems_are_kept_with_their_decisions(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    ledger.begin_run('old', at=0, parsl_run_dir='', command='')
    decide(ledger, 1)
    ledger.decisions.problem({'of': 'old'})
    ledger.begin_run('new', at=10, parsl_run_dir='', command='', about={'host': 'h', 'pid': 7})
    for i in range(PROBLEMS_KEPT + 3):
        decide(ledger, 10 + i // 2)  # two of a time are told apart
        if i != PROBLEMS_KEPT:
            ledger.decisions.problem({'number': i})
    ledger.close()
    with Reader(tmp_path / 'l.db') as reader:
        old, new = reader.history().runs
        assert [row['problem'] for row in reader.recent_decisions(old, 9)] == [{'of': 'old'}]
        rows = reader.recent_decisions(new, 1000)
        assert reader.recent_decisions(new, 2) == rows[:2]
        assert (reader.about(old), reader.about(new)) == ({}, {'host': 'h', 'pid': 7})
        [began] = reader.recent_events(new, ['RunBegan', 'Other'], 5)
    assert began['at'] == 10
    problems = [row['problem'] and row['problem']['number'] for row in rows]
    last = PROBLEMS_KEPT + 2
    assert problems == [last, last - 1, None, *range(last - 3, 1, -1), None, None]
    assert rows[0]['allocation'] == {'a': 1} and rows[0]['actions'] == (START,)


def test_a_run_says_now_and_then_that_it_lives(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    ledger.begin_run('r', at=100, parsl_run_dir='', command='')
    with Reader(tmp_path / 'l.db') as reader:
        for now, noted in (
            (100 + ALIVE_S / 2, 100),
            (100 + ALIVE_S, 100 + ALIVE_S),
            (101 + ALIVE_S, 100 + ALIVE_S),
        ):
            ledger.alive(now)
            ledger.commit()
            assert reader.history().runs[0].last_at == noted
    ledger.close()
