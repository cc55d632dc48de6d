"""By default a node has one rank for each of its accelerators."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint
from parsl_freetrain.executor.fragment.runner import FRAGMENT, FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.training.checkpoint.identity import record_or_compare
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.training import TrainingSpec
from tests.support.parsl_sides import NoParsl
from tests.support.training import fit


def spec(**settings: Any) -> TrainingSpec:
    return ft.freetrain_app(total_epochs=1, **settings)(fit).spec


def test_ranks_per_node() -> None:
    for settings, accelerators, per_node in (
        ({}, (), 1),
        ({}, (0, 0), 1),
        ({}, (4, 4), 4),
        ({}, (4, 2), 2),
        ({}, (4, 0), 1),
        ({'ranks': ft.Ranks(per_node=2)}, (4, 4), 2),
        ({'mode': ft.Reproducible(shards=4)}, (4, 4), 2),  # 2 nodes share 4 shards
        ({'mode': ft.Throughput()}, (8,), 8),
        ({'sizes': {2: ft.Shape(data=4)}, 'max_nodes': None}, (8, 8), 2),
    ):
        found = spec(**{'max_nodes': 2, **settings})
        assert found.ranks_on(accelerators) == per_node
        assert found.with_ranks(per_node).ranks.per_node == per_node


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[tuple[FragmentRunner, list[FragmentOrder]]]:
    """Runs trainer 'fit' on up to 2 nodes, and collects the orders that nodes get."""
    control = ControlServer(None, '127.0.0.1', (50000, 60000))
    settings, sent = spec(max_nodes=2), list[FragmentOrder]()

    def submit(context: dict[str, Any], buffer: bytes) -> Future[Any]:
        sent.append(context['task_executor']['a'][0].fragment)
        return Future()

    endpoint = ControlEndpoint(['127.0.0.1'], control.port, None, None, '/logs')
    runner = FragmentRunner(control, Stream([]), endpoint, ft.Timeouts(), NoParsl(submit))
    nothing: Any = lambda *_: Future()  # noqa: E731
    known = settings.trainer('fit'), settings, str(tmp_path), nothing, ft.TrainingFuture('fit')
    runner.records['fit'] = TrainerRecord(*known, ft.Checkpoint('fit', '', 0, 0))
    yield runner, sent
    control.close()


def test_the_first_nodes_determine_the_shards(
    orders: tuple[FragmentRunner, list[FragmentOrder]], caplog: pytest.LogCaptureFixture
) -> None:
    runner, sent = orders
    for node, devices in (('a', 2), ('b', 4), ('c', 4), ('d', 1)):
        runner.take(ev.NodesJoined(0.0, 'block', (node,), devices=(devices,)))
    for number, nodes in enumerate((('a',), ('b', 'c'), ('b', 'd')), start=1):
        runner.start(ev.StartFragment('fit', number, nodes, None, 0), 0.0)
        runner.arrived({'resource_spec': {FRAGMENT: f'fit/{number}'}}, b'', Future())
    assert [(order.per_node, order.spec.shards) for order in sent] == [
        (2, 4),
        *[(2, 4)] * 2,  # more ranks than the shards suffice for are not used
        *[(1, 4)] * 2,
    ]
    assert [record.getMessage().split(':')[0] for record in caplog.records] == [
        'Trainer fit uses 2 accelerators of each node, and its nodes have 4, 4',
        'Trainer fit uses 1 accelerators of each node, and its nodes have 1, 4',
    ]


def test_number_of_shards_that_followed_from_the_nodes_may_be_stated_later(tmp_path: Path) -> None:
    record_or_compare(tmp_path, 'fit', {'function': 'f', **spec(max_nodes=2).mode.identity()})
    stated = spec(max_nodes=2, mode=ft.Reproducible(shards=8)).mode.identity()
    record_or_compare(tmp_path, 'fit', {'function': 'f', **stated})
