"""What earlier runs have used of a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsl_freetrain.core.model.charge import Charge
from parsl_freetrain.core.model.events import (
    BlockClosed,
    BlockOpened,
    BlockRequeued,
    BlockStarted,
    TrainerSubmitted,
)
from parsl_freetrain.core.model.types import BlockRequest, Trainer
from parsl_freetrain.ledger.usage import charged, used_node_s
from parsl_freetrain.ledger.writer import Ledger


def test_fragments_of_all_runs_count_for_their_owners(tmp_path: Path) -> None:
    path = tmp_path / 'ledger.sqlite'
    assert used_node_s(path) == {}
    for run, begin in (('first', 1000.0), ('second', 2000.0)):
        ledger = Ledger(path)
        ledger.begin_run(run, at=begin, parsl_run_dir='', command='')
        for name, owner in (('a', 'anna'), ('b', '')):
            trainer = Trainer(name, 1, 4, user=owner, group='lab')
            ledger.decisions.batch(begin, (TrainerSubmitted(begin, trainer),))
            ledger.trainers.submitted(name=name, at=begin, spec={}, total_samples=None, samples=0)
            nodes = ['n0', 'n1'] if name == 'a' else ['n2']
            ledger.trainers.fragment_decided(
                name, 1, at=begin, task_id=None, nodes=nodes, deadline=None, from_samples=0
            )
        ledger.trainers.fragment_ended(
            'a', 1, at=begin + 50, ending='stopped', samples=0, reached=0
        )
        ledger.commit()
        if run == 'first':  # b's fragment is cut off with its run
            ledger.end_run(run, at=begin + 80, how='finished')
        else:
            ledger.trainers.fragment_ended(
                'b', 1, at=begin + 20, ending='stopped', samples=0, reached=0
            )
        ledger.close()
    used = used_node_s(path)
    assert used['user anna'] == used['trainer a'] == pytest.approx(2 * 2 * 50)
    assert used['trainer b'] == pytest.approx(80 + 20)
    assert used['group lab'] == used['total'] == pytest.approx(200 + 100)


def test_blocks_of_all_runs_are_charged(tmp_path: Path) -> None:
    path = tmp_path / 'ledger.sqlite'
    assert charged(path) == 0.0
    hourly = BlockRequest(2, 3600.0, charge=Charge(1.0), lasts_s=3600.0)
    for run in ('first', 'second'):
        ledger = Ledger(path)
        ledger.begin_run(run, at=0.0, parsl_run_dir='', command='')
        for event in (
            BlockOpened(0.0, 'requeued', hourly),
            BlockStarted(20.0, 'requeued', 10.0),
            BlockRequeued(1810.0, 'requeued'),
            BlockStarted(2000.0, 'requeued', 2000.0),
            BlockClosed(3800.0, 'requeued'),
            BlockOpened(0.0, 'withdrawn', hourly),
            BlockClosed(900.0, 'withdrawn'),
        ):
            ledger.decisions.batch(event.at, (event,))
        if run == 'second':  # its end is not known: it may have lasted as long as it could
            ledger.decisions.batch(4000.0, (BlockOpened(4000.0, 'left', hourly),))
        ledger.close()
    assert charged(path) == pytest.approx(2 * (2 * 0.5 + 2 * 0.5) + 2.0)
