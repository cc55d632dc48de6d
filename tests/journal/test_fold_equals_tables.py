"""The state that is folded of a run's events says the same as the tables of the ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from parsl_freetrain import LocalSite, freetrain_app
from parsl_freetrain.core.model.state import Fragment, History
from parsl_freetrain.executor.ledger_writer import LedgerWriter
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FragmentRow, RunHistory
from parsl_freetrain.ledger.writer import Ledger
from tests.support.journals import demo_journal
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until


def of_fragment(one: Fragment | FragmentRow) -> tuple[object, ...]:
    if isinstance(one, Fragment):
        seen = one.seen
        return (
            *one.key, one.decided_at, one.launched.task, one.nodes, one.launched.deadline_s,
            one.from_samples, one.started_at, one.started_samples,
            *((seen.at, seen.samples, seen.rate, seen.metrics) if seen else (None,) * 3 + ({},)),
            one.ended_at, one.ending, one.samples, one.reached,
            None if one.ended is None else one.ended.error,
        )  # fmt: skip
    return (
        *one.key, one.decided_at, one.task_id, one.nodes, one.deadline, one.from_samples,
        one.started_at, one.started_samples, one.seen_at, one.seen_samples, one.rate, one.metrics,
        one.ended_at, one.ending, one.samples, one.reached, one.error,
    )  # fmt: skip


def compare(tables: RunHistory, found: History) -> None:
    assert [(r.id, r.name, r.ended_at, r.how) for r in tables.runs] == [
        (r.id, r.name, r.ended_at, r.how) for r in found.runs
    ]
    assert [
        (t.run, t.name, t.submitted_at, t.total_samples, t.first_samples, t.samples, t.state,
         t.state_at, t.why) for t in tables.trainers
    ] == [
        (t.run, t.name, t.submitted_at, t.trainer.total_samples, t.first_samples, t.samples,
         t.state, t.state_at, t.why) for t in found.trainings
    ]  # fmt: skip
    assert sorted(
        (b.run, b.block, b.opened_at, b.job_id, b.nodes, b.walltime_s, b.until, b.names,
         b.node_class, b.closed_at, b.how) for b in tables.blocks
    ) == sorted(
        (b.run, b.name, b.opened_at, b.opened.job_id, b.opened.request.nodes,
         b.opened.request.walltime_s, b.until, b.opened.request.names, b.opened.request.node_class,
         b.closed_at, b.how) for b in found.blocks
    )  # fmt: skip
    assert sorted(
        (n.run, n.node, n.block, n.name, n.joined_at, n.left_at, n.how) for n in tables.nodes
    ) == sorted(
        (n.run, n.node, n.block, n.name, n.joined_at, n.left_at, n.how) for n in found.nodes
    )
    assert sorted(map(of_fragment, tables.fragments)) == sorted(map(of_fragment, found.fragments))
    assert sorted(
        (c.trainer, c.fragment, c.at, c.samples, c.path, c.seconds, c.pause_s, c.pause)
        for c in tables.checkpoints
    ) == sorted(
        (c.trainer, c.fragment, c.at, c.samples, c.path, c.seconds, c.pause_s, c.pause)
        for run in found.runs
        for c in run.checkpoints
    )
    assert sorted(
        (o.run, o.name, o.start, math.inf if o.end is None else o.end) for o in tables.offers
    ) == sorted((run.id, o.node, o.start, o.end) for run in found.runs for o in run.offers.values())


@pytest.mark.parametrize(('seed', 'ended'), [(0, True), (1, True), (2, False)])
def test_a_made_run(tmp_path: Path, seed: int, ended: bool) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    ledger.begin_run('run-0', at=1_790_000_000.0, parsl_run_dir='', command='')
    beside = LedgerWriter(ledger, 'run-0', {})
    path = demo_journal(tmp_path / 'l.journal', ended=ended, seed=seed, beside=[beside])
    journal = Journal(path)
    with Reader(tmp_path / 'l.db') as reader:
        compare(reader.history(), journal.history())
        progress = sorted((p.key, p.at, p.samples, p.metrics['loss']) for p in reader.progress())
    assert progress == sorted(
        (f.key, p.at, p.samples, p.metrics['loss'])
        for f in journal.history().fragments
        for p in f.progress
    )
    assert not journal.history().damage


def test_a_real_run(tmp_path: Path) -> None:
    site = LocalSite(nodes=2, poll_s=0.2)
    with freetrain(tmp_path, site) as executor:
        first = freetrain_app(max_nodes=2, total_epochs=30)(fit)(pause_s=0.01)
        wait_until(lambda: first.progress().samples > 200)
        second = freetrain_app(max_nodes=2, total_epochs=4)(fit)()
        second.result(LIMIT_S)
        first.cancel()
        wait_until(first.done)
    journal = Journal(executor.ledger_path.with_suffix('.journal'))
    found = journal.history()
    with Reader(executor.ledger_path) as reader:
        compare(reader.history(), found)
        run = reader.history().runs[0]
        batches = [(batch.seq, batch.at, batch.events) for batch in reader.batches(run)]
        kept = [(b.seq, b.at, b.events) for b in journal.batches(found.runs[0])]
        assert [len(events) for *_, events in batches] == [len(events) for *_, events in kept]
        assert json.dumps([d['allocation'] for d in reader.decisions()]) == json.dumps(
            [d.allocation for d in found.runs[0].decisions]
        )
        last = reader.recent_decisions(run, 1)[0]['problem']
        assert last == found.runs[0].decisions[-1].document
