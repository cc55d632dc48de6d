"""The writing side of the ledger."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.ledger.connection import Transaction, open_for_writing

log = logging.getLogger(__name__)

Value = str | int | float | None

PROBLEMS_KEPT = 20
"""Of so many decisions of a run it is kept what exactly was asked."""

ALIVE_S = 30.0
"""A run that has nothing to note says so often, in seconds, that it lives."""


class Ledger:
    """The one writer of a ledger file.

    What the methods are told is kept in memory until :meth:`commit`, which writes it in one short
    transaction: a reader never sees half of a planner's round and is never locked out for long. The file
    has a rollback journal, not a write-ahead log, because it may lie on NFS or Lustre; after kill -9 of
    the writer it holds everything up to the last commit.

    All times are ``time.time()`` epoch seconds. One thread calls all methods; another may take over when
    that one has ended, or by beginning a run.

    Parameters
    ----------
    path
        The file; created, with its missing parents, for the user alone (0600 in 0700). An existing ledger is
        appended to.

    Raises
    ------
    BadInput
        ``path`` cannot be written, is no ledger, or is one of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._pending: list[tuple[str, list[tuple[Value, ...]]]] = []
        self._owner: threading.Thread | None = None
        self._run: int | None = None
        self._last_at = -math.inf
        self._written_at = -math.inf
        self._offers: list[tuple[Value, ...]] | None = None
        self._complained = False
        self._connection = open_for_writing(self.path)

    def close(self) -> None:
        """Commit and close the file; calling it again does nothing."""
        if self._run is not None:
            self.commit()
        self._connection.close()
        self._run = None

    def begin_run(self, run: str, *, at: float, parsl_run_dir: str, command: str, about: Mapping[str, Any] | None = None) -> None:
        """Start a run (or a resume); written at once. ``run`` is Parsl's run id, unique within the ledger.

        Parameters
        ----------
        about
            Who runs it, where: the detail of an event of kind 'RunBegan'.

        Raises
        ------
        BadInput
            The ledger has a run of this name, or cannot be written.
        """
        try:
            with Transaction(self._connection):
                cursor = self._connection.execute(
                    'INSERT INTO runs (name, begun_at, last_at, parsl_run_dir, command) VALUES (?, ?, ?, ?, ?)',
                    (str(run), float(at), float(at), str(parsl_run_dir), str(command)),
                )
                if about is not None:
                    self._connection.execute("INSERT INTO events (run, at, kind, detail) VALUES (?, ?, 'RunBegan', ?)",
                                             (cursor.lastrowid, float(at), _json(about)))
        except sqlite3.IntegrityError:
            raise BadInput(f'The ledger {self.path} has a run {run!r} already; each run needs a name of its own.') from None
        except sqlite3.OperationalError as error:
            raise BadInput(f'The ledger {self.path} cannot be written ({error}); give a path that can.') from error
        self._run = cursor.lastrowid
        self._last_at = self._written_at = float(at)
        self._offers = None
        self._owner = None

    def end_run(self, run: str, *, at: float, how: str) -> None:
        """End the run that was begun, for example ``how='done'`` or ``'interrupted'``; written at once."""
        self._note('UPDATE runs SET ended_at = ?, how = ? WHERE name = ?', (float(at), str(how), str(run)), at, with_run=False)
        self.commit()

    def event(
        self,
        *,
        at: float,
        kind: str,
        trainer: str | None = None,
        fragment: int | None = None,
        block: str | None = None,
        node: str | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Something that the planner was told."""
        self._note(
            'INSERT INTO events (run, at, kind, trainer, fragment, block, node, detail) VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
            (float(at), str(kind), trainer, _int(fragment), block, node, None if detail is None else _json(detail)),
            at,
        )

    def decision(
        self,
        *,
        at: float,
        trigger: str,
        nodes: int,
        status: str,
        solver: str,
        objective: float,
        seconds: float,
        staying: float,
        current: Mapping[str, int],
        allocation: Mapping[str, int],
        actions: Sequence[str],
    ) -> None:
        """What the allocator was asked and answered; ``staying`` is the objective of keeping what runs."""
        self._note(
            'INSERT INTO decisions (run, at, trigger, nodes, status, solver, objective, staying, seconds, current, '
            'allocation, actions) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)',
            (
                float(at),
                str(trigger),
                int(nodes),
                str(status),
                str(solver),
                _number(objective),
                _number(staying),
                _number(seconds),
                _json(current),
                _json(allocation),
                _json(list(actions)),
            ),
            at,
        )

    def problem(self, document: Mapping[str, Any]) -> None:
        """What the allocator was asked in the decision that was noted last; of each run only the newest few are kept."""
        self._note('INSERT INTO problems (run, decision, problem) SELECT ?, max(rowid), ? FROM decisions', (_json(document),), None)
        run = self._run_id()
        self._note('DELETE FROM problems WHERE run = ? AND rowid NOT IN (SELECT rowid FROM problems WHERE run = ? '
                   'ORDER BY rowid DESC LIMIT ?)', (run, run, PROBLEMS_KEPT), None, with_run=False)

    def trainer(self, *, name: str, at: float, spec: Mapping[str, Any], total_samples: int | None, samples: int) -> None:
        """A trainer was submitted; ``samples`` were trained already when it is resumed."""
        self._note(
            'INSERT OR REPLACE INTO trainers (run, name, submitted_at, spec, total_samples, first_samples, samples, '
            "state, state_at, why) VALUES (?, ?, ?, ?, ?, ?, ?, 'waiting', ?, '')",
            (str(name), float(at), _json(spec), _int(total_samples), int(samples), int(samples), float(at)),
            at,
        )

    def trainer_state(self, name: str, *, at: float, state: str, why: str = '') -> None:
        """A trainer's state changed; 'finished', 'failed' and 'cancelled' are final."""
        self._note(
            'UPDATE trainers SET state = ?, state_at = ?, why = ? WHERE run = ? AND name = ?',
            (str(state), float(at), str(why), self._run_id(), str(name)),
            at,
            with_run=False,
        )

    def trainer_total(self, name: str, total_samples: int | None) -> None:
        """A trainer that is measured in epochs knows its total."""
        self._note(
            'UPDATE trainers SET total_samples = ? WHERE run = ? AND name = ?',
            (_int(total_samples), self._run_id(), str(name)),
            None,
            with_run=False,
        )

    def block_opened(
        self, block: str, *, at: float, job_id: str | None, nodes: int, walltime_s: float | None, names: Sequence[str]
    ) -> None:
        """A block was submitted; ``names`` is empty where the scheduler chooses the nodes."""
        until = None if walltime_s is None else float(at) + float(walltime_s)
        self._note(
            'INSERT OR REPLACE INTO blocks (run, block, opened_at, job_id, nodes, walltime_s, until, names) '
            'VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
            (str(block), float(at), None if job_id is None else str(job_id), int(nodes), _float(walltime_s), until, _json(list(names))),
            at,
        )

    def block_until(self, block: str, *, until: float | None) -> None:
        """The end of a block became known or moved; without this call it is opening + walltime, where that is known."""
        self._note(
            'UPDATE blocks SET until = ? WHERE run = ? AND block = ?', (_float(until), self._run_id(), str(block)), None, with_run=False
        )

    def block_closed(self, block: str, *, at: float, how: str) -> None:
        """A block is over: 'taken', 'expired', 'returned', 'cancelled' or 'lost'."""
        self._note(
            'UPDATE blocks SET closed_at = ?, how = ? WHERE run = ? AND block = ?',
            (float(at), str(how), self._run_id(), str(block)),
            at,
            with_run=False,
        )

    def node_joined(self, node: str, *, at: float, block: str, name: str) -> None:
        """A node is ready for fragments; ``node`` is unique within the run, ``name`` is the machine's."""
        self._note(
            'INSERT OR REPLACE INTO nodes (run, node, block, name, joined_at) VALUES (?, ?, ?, ?, ?)',
            (str(node), str(block), str(name), float(at)),
            at,
        )

    def node_left(self, node: str, *, at: float, how: str) -> None:
        """A node is gone."""
        self._note(
            'UPDATE nodes SET left_at = ?, how = ? WHERE run = ? AND node = ?',
            (float(at), str(how), self._run_id(), str(node)),
            at,
            with_run=False,
        )

    def fragment_decided(
        self,
        trainer: str,
        fragment: int,
        *,
        at: float,
        task_id: int | None,
        nodes: Sequence[str],
        deadline: float | None,
        from_samples: int,
    ) -> None:
        """A fragment is to start on ``nodes`` (ids as in :meth:`node_joined`); its trainer runs from here on."""
        self._note(
            'INSERT OR REPLACE INTO fragments (run, trainer, fragment, decided_at, task_id, nodes, deadline, '
            'from_samples) VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
            (str(trainer), int(fragment), float(at), _int(task_id), _json(list(nodes)), _float(deadline), int(from_samples)),
            at,
        )

    def fragment_task(self, trainer: str, fragment: int, task_id: int | None) -> None:
        """The fragment's Parsl task id, where it was not known when the fragment was decided."""
        self._fragment(trainer, fragment, 'task_id = ?', (_int(task_id),), None)

    def fragment_started(self, trainer: str, fragment: int, *, at: float, samples: int) -> None:
        """The fragment's first training step was handed out."""
        self._fragment(trainer, fragment, 'started_at = ?, started_samples = ?', (float(at), int(samples)), at)

    def fragment_progress(
        self, trainer: str, fragment: int, *, at: float, samples: int, rate: float | None, metrics: Mapping[str, float] | None
    ) -> None:
        """Samples trained so far, samples per second, and the last reported metrics; kept as a time series."""
        known = _json(dict(metrics or {}))
        self._note(
            'INSERT INTO progress (run, trainer, fragment, at, samples, rate, metrics) VALUES (?, ?, ?, ?, ?, ?, ?)',
            (str(trainer), int(fragment), float(at), int(samples), _float(rate), known),
            at,
        )
        self._fragment(
            trainer, fragment, 'seen_at = ?, seen_samples = ?, rate = ?, metrics = ?', (float(at), int(samples), _float(rate), known), at
        )

    def checkpoint(
        self, trainer: str, fragment: int, *, at: float, samples: int, path: str, seconds: float, metrics: Mapping[str, float] | None
    ) -> None:
        """A checkpoint was committed at ``at``; writing it took ``seconds``."""
        self._note(
            'INSERT INTO checkpoints (run, trainer, fragment, at, samples, path, seconds, metrics) VALUES (?, ?, ?, ?, ?, ?, ?, ?)',
            (str(trainer), int(fragment), float(at), int(samples), str(path), max(0.0, float(seconds)), _json(dict(metrics or {}))),
            at,
        )
        self._kept(trainer, samples)

    def fragment_ended(self, trainer: str, fragment: int, *, at: float, ending: str, samples: int, reached: int, error: str = '') -> None:
        """A fragment is over: 'finished', 'stopped', 'preempted' or 'failed'.

        ``samples`` is the last checkpoint's, ``reached`` the furthest that was seen: the difference is repeated.
        """
        self._fragment(
            trainer,
            fragment,
            'ended_at = ?, ending = ?, samples = ?, reached = ?, error = ?',
            (float(at), str(ending), int(samples), int(reached), str(error)),
            at,
        )
        self._kept(trainer, samples)

    def offers(self, rows: Iterable[tuple[str, float, float | None]]) -> None:
        """What the site offers in this run, (node name, start, end) each; replaces what was said before.

        An end of None (or infinity) is not known. Time after the run's end never counts as offered.
        """
        run = self._run_id()
        new: list[tuple[Value, ...]] = [
            (run, str(name), float(start), None if end is None or math.isinf(end) else float(end)) for name, start, end in rows
        ]
        if new == self._offers:
            return
        self._note('DELETE FROM offers WHERE run = ?', (run,), None, with_run=False)
        self._pending.append(('INSERT INTO offers (run, name, start, "end") VALUES (?, ?, ?, ?)', new))
        self._offers = new

    def alive(self, at: float) -> None:
        """The run goes on, whether or not anything has happened."""
        if at - self._written_at >= ALIVE_S:
            self._last_at = max(self._last_at, float(at))

    def commit(self) -> None:
        """Write what is pending. If the file cannot be written now, it stays pending and a warning is logged once."""
        run = self._run_id()
        if not self._pending and self._last_at == self._written_at:
            return
        try:
            with Transaction(self._connection):
                for statement, rows in self._pending:
                    self._connection.executemany(statement, rows)
                self._connection.execute('UPDATE runs SET last_at = max(last_at, ?) WHERE id = ?', (self._last_at, run))
        except sqlite3.OperationalError as error:
            # A full disk or a stuck lock must not end the training that this ledger describes.
            if not self._complained:
                log.warning('The ledger %s cannot be written now (%s); what happened is kept in memory and tried again.', self.path, error)
            self._complained = True
            return
        self._pending.clear()
        self._written_at = self._last_at
        self._complained = False

    def _fragment(self, trainer: str, fragment: int, what: str, values: tuple[Value, ...], at: float | None) -> None:
        self._note(
            f'UPDATE fragments SET {what} WHERE run = ? AND trainer = ? AND fragment = ?',  # noqa: S608 - our own words
            (*values, self._run_id(), str(trainer), int(fragment)),
            at,
            with_run=False,
        )

    def _kept(self, trainer: str, samples: int) -> None:
        self._note(
            'UPDATE trainers SET samples = ? WHERE run = ? AND name = ?', (int(samples), self._run_id(), str(trainer)), None, with_run=False
        )

    def _note(self, statement: str, values: tuple[Value, ...], at: float | None, *, with_run: bool = True) -> None:
        run = self._run_id()
        # A lone surrogate (a file name in an error text) would make every later commit fail.
        clean = tuple(v.encode('utf-8', 'replace').decode() if isinstance(v, str) else v for v in values)
        self._pending.append((statement, [(run, *clean) if with_run else clean]))
        if at is not None:
            self._last_at = max(self._last_at, float(at))

    def _run_id(self) -> int:
        me = threading.current_thread()
        if self._owner is None:
            self._owner = me
        elif self._owner is not me:
            if self._owner.is_alive():
                raise RuntimeError(
                    f'The ledger {self.path} is written by thread {self._owner.name!r} and was called from '
                    f'{me.name!r}; all calls must come from one thread.'
                )
            self._owner = me
        if self._run is None:
            raise RuntimeError(f'The ledger {self.path} has no run to write to; call begin_run first.')
        return self._run


def _json(value: object) -> str:
    return json.dumps(value, default=_plain, separators=(',', ':'))


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, 'item') else str(value)


def _int(value: int | None) -> int | None:
    return None if value is None else int(value)


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _number(value: float) -> float:
    # SQLite stores NaN as NULL, which a NOT NULL column refuses.
    return -math.inf if math.isnan(value) else float(value)
