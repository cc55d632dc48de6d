"""A fragment that is to stop for a rescale and is told of a rehearsed preemption: whichever comes first, the preemption's grace holds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.app import TrainingFuture, freetrain_app
from parsl_freetrain.core import events as ev
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.executor.control import ControlServer
from parsl_freetrain.executor.fragments import FRAGMENT, FragmentRunner, Line, Patience
from parsl_freetrain.executor.trainers import TrainerRecord
from parsl_freetrain.ledger.store import Ledger
from tests.support.training import fit

GRACE_S = 10.0
NODES = ('b/x', 'b/y')


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[FragmentRunner, TrainerRecord]]:
    """A fragment that trains on one node, as far as its executor knows."""
    control = ControlServer(None, '127.0.0.1', (50000, 60000))
    ledger = Ledger(tmp_path / 'ledger.sqlite')
    ledger.begin_run('r', at=0.0, parsl_run_dir='', command='')
    settings = freetrain_app(total_epochs=1, max_nodes=2)(fit).settings
    record = TrainerRecord(settings.trainer('fit'), settings.terms(str(tmp_path)), lambda specification, previous: Future(),
                           TrainingFuture('fit'), Checkpoint('fit', '', 0, 0))
    runner = FragmentRunner(control, ledger, Line(['127.0.0.1'], control.port, None, None), Patience(),
                            lambda context, buffer: Future(), lambda trainer, fragment, member, done: None)
    runner.start(ev.StartFragment('fit', 1, NODES[:1], None, 0), record, 0.0)
    runner.arrived({'resource_spec': {FRAGMENT: 'fit/1'}}, b'', Future(), {'fit': record})
    message: dict[str, Any] = {'trainer': 'fit', 'fragment': 1, 'member': 0, 'rank': 0, 'at': 1.0, 'samples': 0}
    runner.heard({**message, 'kind': 'started'}, record, 1.0)
    yield runner, record
    ledger.close()
    control.close()


@pytest.mark.parametrize('rehearsed_first', [True, False])
def test_a_rescale_does_not_weaken_a_rehearsed_preemption(training: tuple[FragmentRunner, TrainerRecord], rehearsed_first: bool) -> None:
    runner, record = training
    gang = runner.gangs['fit', 1]
    stop = ev.StopFragment('fit', 1, 'rescale from 1 to 2 nodes', NODES)
    if not rehearsed_first:
        runner.stop(stop, record, 2.0)
        assert gang.awaited == {0}      # it trains on until the ranks of the next fragment are ready
    runner.rehearse('fit', GRACE_S, 3.0)
    if rehearsed_first:
        runner.stop(stop, record, 4.0)
    assert not gang.awaited
    runner.overdue(3.0 + GRACE_S)
    assert not gang.abandoned
    runner.overdue(3.0 + GRACE_S + 0.5)
    assert gang.abandoned == f'it did not stop within {GRACE_S:g} s'
