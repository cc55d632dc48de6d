"""A fragment that stops for a rescale and is preempted: the preemption's grace holds."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain import Checkpoint, Timeouts, TrainingFuture, freetrain_app
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import FragmentStarted
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint
from parsl_freetrain.executor.fragment.runner import FRAGMENT, FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.training.spec.messages import FromMember
from tests.support.parsl_sides import NoParsl
from tests.support.training import fit

GRACE_S = 10.0
NODES = ('b/x', 'b/y')


@pytest.fixture
def training(tmp_path: Path) -> Iterator[FragmentRunner]:
    """A fragment that trains on one node, as far as its executor knows."""
    control = ControlServer(None, '127.0.0.1', (50000, 60000))
    settings = freetrain_app(total_epochs=1, max_nodes=2)(fit).spec
    begun: Any = Checkpoint('fit', '', 0, 0)
    known = settings.trainer('fit'), settings, str(tmp_path)
    record = TrainerRecord(*known, lambda *_: Future(), TrainingFuture('fit'), begun)
    endpoint = ControlEndpoint(['127.0.0.1'], control.port, None, None, '/logs')
    runner = FragmentRunner(control, Stream([]), endpoint, Timeouts(), NoParsl())
    runner.records['fit'] = record
    runner.start(ev.StartFragment('fit', 1, NODES[:1], None, 0), 0.0)
    runner.arrived({'resource_spec': {FRAGMENT: 'fit/1'}}, b'', Future())
    runner.heard(FromMember('fit', 1, 0, FragmentStarted(1.0, 'fit', 1, 0)), 1.0)
    yield runner
    control.close()


@pytest.mark.parametrize('rehearsed_first', [True, False])
def test_a_rescale_does_not_weaken_preemption(
    training: FragmentRunner, rehearsed_first: bool
) -> None:
    runner = training
    fragment = runner.running['fit', 1]
    stop = ev.StopFragment('fit', 1, 'rescale from 1 to 2 nodes', NODES)
    if not rehearsed_first:
        runner.stop(stop, 2.0)
        assert fragment.stopping.awaited == {
            0
        }  # it trains on until the ranks of the next fragment are ready
    runner.rehearse('fit', GRACE_S, 3.0)
    if rehearsed_first:
        runner.stop(stop, 4.0)
    assert not fragment.stopping.awaited
    runner.look(3.0 + GRACE_S)
    assert not fragment.given_up.why
    runner.look(3.0 + GRACE_S + 0.5)
    assert fragment.given_up.why == f'it did not stop within {GRACE_S:g} s'
