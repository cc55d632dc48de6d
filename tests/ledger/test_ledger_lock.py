"""A ledger that somebody else has locked: the run goes on, and its rows wait."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsl_freetrain.ledger import pending_rows
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.writer import Ledger

READS = ('BEGIN', 'SELECT * FROM runs')
WRITES = ('BEGIN EXCLUSIVE',)


@contextlib.contextmanager
def another(path: Path, statements: tuple[str, ...]) -> Iterator[sqlite3.Connection]:
    """Somebody who has begun a transaction and does not end it."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        for statement in statements:
            other.execute(statement).fetchall()
        yield other


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / 'l.db')
    made.begin_run('r0', at=1000.0, parsl_run_dir='', command='')
    return made


def waits_ms(ledger: Ledger) -> int:
    """How long a statement of it waits now, in ms."""
    found: int = ledger._connection.execute('PRAGMA busy_timeout').fetchone()[0]
    return found


@pytest.mark.parametrize('statements', [READS, WRITES])
def test_a_lock_holds_no_round_up_and_rows_wait_for_its_end(
    ledger: Ledger,
    statements: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert pending_rows.WRITE_S <= 1
    monkeypatch.setattr(pending_rows, 'WRITE_S', 0.1)
    said: list[str] = []
    with another(ledger.path, statements):
        ledger._connection.set_trace_callback(said.append)
        ledger.event(at=1001, kind='first')
        ledger.commit()
        assert waits_ms(ledger) == 100
        ledger.event(at=1002, kind='second')
        ledger.commit()
        assert waits_ms(ledger) == 50
    assert not any(statement.startswith('INSERT') for statement in said), 'tried in vain'
    [warning] = caplog.records
    assert str(ledger.path) in warning.getMessage()
    ledger.commit()
    with Reader(ledger.path) as reader:
        assert [event['kind'] for event in reader.events()] == ['first', 'second']
    ledger.event(at=1003, kind='third')
    ledger.commit()
    assert waits_ms(ledger) == 100
    ledger.close()


def test_at_the_end_of_the_run_it_waits_longer(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending_rows, 'WRITE_S', 0.05)
    with another(ledger.path, READS) as other:

        def leave(statement: str) -> None:
            if statement == 'PRAGMA busy_timeout = 10000':
                other.execute('ROLLBACK')

        ledger._connection.set_trace_callback(leave)
        ledger.end_run('r0', at=1001, how='done')
        ledger.close()
    with Reader(ledger.path) as reader:
        assert reader.history().runs[0].how == 'done'
    assert 'lacks its last rows' not in caplog.text


def test_what_could_not_be_written_to_the_end_is_said_once(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr('parsl_freetrain.ledger.writer.LAST_S', 0.05)
    with another(ledger.path, WRITES):
        ledger.event(at=1001, kind='lost')
        ledger.close()
        ledger.close()
    assert caplog.text.count('lacks its last rows') == 1


def test_rows_that_wait_for_long_do_not_fill_the_memory(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pending_rows, 'MOST_HELD', 50_000)
    monkeypatch.setattr(ledger._rows, '_thin_at', 50_000)
    monkeypatch.setattr(pending_rows, 'WRITE_S', 0.05)
    with another(ledger.path, WRITES):
        ledger.trainers.submitted(name='a', at=1001, spec={}, total_samples=9000, samples=0)
        for fragment in (1, 2):
            ledger.trainers.fragment_decided(
                'a', fragment, at=1001, task_id=1, nodes=['n'], deadline=None, from_samples=0
            )
            ledger.commit()
            for n in range(1000):
                samples = 1000 * fragment + n
                ledger.trainers.fragment_progress(
                    'a', fragment, at=1002 + n, samples=samples, rate=1.0, metrics={'loss': n}
                )
                assert ledger._rows._held <= 50_000 >= 500 * len(ledger._rows._pending)
        ledger.trainers.state('a', at=3000, state='failed', why='of it')
    ledger.commit()
    ledger.event(at=3001, kind='after')
    ledger.close()
    assert 'rows are left out' in caplog.text
    with Reader(ledger.path) as reader:
        history = reader.history()
        assert 0 < len(reader.progress()) < 1000
        assert [event['kind'] for event in reader.events()] == ['after']
    assert [fragment.seen_samples for fragment in history.fragments] == [1999, 2999]
    assert [trainer.state for trainer in history.trainers] == ['failed']
