"""What travels between a client and an endpoint, without either."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import joblib
import numpy
import pytest

from parsl_freetrain import (
    BadInput,
    Checkpoint,
    Checkpoints,
    Owner,
    Retention,
    Samples,
    Scaled,
    Scaling,
    Shape,
    Throughput,
    TrainerFailed,
    freetrain_app,
)
from parsl_freetrain.cli.doctor.asking import ask_endpoint
from parsl_freetrain.cli.doctor.checks import findings
from parsl_freetrain.executor.fragment.payload import pack
from parsl_freetrain.executor.globus import protocol as orders
from parsl_freetrain.executor.globus.protocol import (
    OK,
    UNKNOWN,
    Answer,
    Order,
    TrainerStatus,
    compare,
    refuse_differences,
    versions_here,
)
from parsl_freetrain.executor.globus.requirements import modules_needed
from parsl_freetrain.executor.trainer.future import Progress
from parsl_freetrain.host.backoff import Backoff
from parsl_freetrain.remote.remote_future import RemoteTraining


def train(ctx: Any) -> object:
    import pandas.api

    try:
        import one_that_may_be_missing  # type: ignore[import-not-found]
    except ImportError:
        one_that_may_be_missing = None
    from os import path

    return joblib, pandas.api, path, one_that_may_be_missing


def quiet(ctx: Any) -> None:
    pass


@pytest.mark.parametrize(
    ('function', 'arguments', 'needed'),
    [
        (train, (), {'joblib', 'pandas'}),
        (quiet, (), set()),
        (quiet, (numpy.float32(1), {'deep': [numpy.zeros(3)]}), {'numpy'}),
        (joblib.dump, (), {'joblib'}),
    ],
)
def test_modules_that_are_needed(
    function: Callable[..., Any], arguments: tuple[Any, ...], needed: set[str]
) -> None:
    found = set(modules_needed(function, pack(function, arguments, {}, 'trainer')))
    assert needed <= found
    assert found <= needed | {'cloudpickle', 'numpy'} - (
        {'numpy'} if function is quiet and not arguments else set()
    )


@pytest.mark.parametrize(
    'settings',
    [
        {'total_samples': 100},
        {
            'total_epochs': 2.5,
            'max_nodes': 4,
            'scaling': Scaling(rate={1: 1.0, 4: 3.0}),
            'checkpoints': Checkpoints(keep=Retention(2, 5, 'loss')),
        },
        {
            'goal': Samples(9, finish_by=1e9),
            'sizes': {1: Shape(), 2: Shape(spatial=(1, 2, 1))},
            'mode': Throughput(),
            'owner': Owner(user='anna'),
            'scaling': Scaling(efficiency={1: 1.0, 2: 0.5}),
        },
        {'total_epochs': 1, 'sizes': [2, 4], 'owner': Owner(group='physics')},
        {'total_epochs': 1, 'mode': Scaled(lr='sqrt', on_nan='skip'), 'owner': Owner(priority=2.0)},
    ],
)
def test_a_description_is_json_and_says_everything(settings: dict[str, Any]) -> None:
    app = freetrain_app(**settings)(quiet)
    order = Order(
        'train',
        'quiet',
        'r1',
        versions=versions_here(),
        modules=('torch',),
        spec=app.spec,
        identity=app.identity(),
    )
    assert isinstance(json.loads(order.to_json()), dict)
    again = Order.from_json(order.to_json())
    assert again == order
    assert again.spec is not None
    assert again.spec.trainer('quiet') == app.spec.trainer('quiet')


@pytest.mark.parametrize('wrong', [None, 'no json', '[]', '{"verb": "train", "speed": 3}', '{}'])
def test_an_order_of_another_version_is_bad_input(wrong: Any) -> None:
    with pytest.raises(BadInput, match='does not understand this order: install the same version'):
        Order.from_json(wrong)


@pytest.mark.parametrize(
    'change',
    [{'speed': 1}, {'scaling': {'rate': 3}}, {'checkpoints': {'keep': 0}}, {'goal': {'count': 1}}],
)
def test_a_specification_that_cannot_be_used_is_bad_input(change: dict[str, Any]) -> None:
    app = freetrain_app(total_samples=1)(quiet)
    right = json.loads(Order('train', 'quiet', spec=app.spec).to_json())
    with pytest.raises(BadInput):
        Order.from_json(json.dumps({**right, 'spec': {**right['spec'], **change}}))


def test_an_answer_arrives_as_it_was_and_nothing_else_is_taken_for_one() -> None:
    checkpoint = Checkpoint('t', '/far/away', 7, 2, {'loss': float('nan')}, {'any': [1, None]})
    status = TrainerStatus('r', 'running', Progress(3, metrics={'loss': 0.5}))
    for sent in (
        Answer(OK, versions={'torch': '2'}, trainers={'t': status}),
        Answer(OK, checkpoint=checkpoint),
        Answer(UNKNOWN, 'There is none.'),
    ):
        assert repr(Answer.from_document(sent.to_document())) == repr(sent)  # NaN is not itself
    for wrong in (None, 7, {}, {'kind': 3}, {'kind': OK, 'trainers': {'t': {'state': 'running'}}}):
        with pytest.raises(BadInput, match='install the same version on both ends'):
            Answer.from_document(wrong)


def test_an_end_without_a_checkpoint_or_a_sentence_is_told_by_one() -> None:
    given = Order('train', 't', 'r1')
    future = RemoteTraining(given, '', lambda *_: None, Backoff(1.0, 1.0))
    future.settle(Answer(OK))
    with pytest.raises(TrainerFailed, match="answered 'ok' without a checkpoint"):
        future.result(timeout=0)


def test_versions_fit_if_what_matters_is_the_same() -> None:
    there = {
        'python': '3.11.2',
        'parsl-freetrain': '2026.11.21',
        'parsl': '2026.10.26',
        'dill': '0.3.9',
        'cloudpickle': '3.1.2',
        'torch': '2.13.0+cu126',
    }
    here = {**there, 'python': '3.11.7', 'torch': '2.13.0+cpu', 'cloudpickle': '3.0.0'}
    refuse_differences(here, there)
    refuse_differences(
        {k: v for k, v in here.items() if k != 'torch'}, there
    )  # a laptop may do without
    for name, version in (
        ('python', '3.12.2'),
        ('parsl-freetrain', '2026.11.22'),
        ('dill', '0.4.1'),
        ('torch', '2.12.0'),
    ):
        with pytest.raises(
            BadInput, match=f'{name} is .* here and {version} at the endpoint; install'
        ):
            refuse_differences(here, {**there, name: version})
    with pytest.raises(BadInput, match='torch is .* here and - at the endpoint'):
        refuse_differences(here, {k: v for k, v in there.items() if k != 'torch'})
    assert [asdict(c)['name'] for c in compare(here, there)] == list(orders.COMPARED)


def test_the_doctor_says_what_keeps_an_endpoint_from_being_asked(tmp_path: Path) -> None:
    if importlib.util.find_spec('globus_compute_sdk') is None:
        [found] = findings({'endpoint': ask_endpoint('x', None)})
        assert found.state == 'bad'
        assert 'Globus Compute SDK, which is not installed here: pip install' in found.says
    (tmp_path / 'options.json').write_text('[1]')
    with pytest.raises(BadInput, match=r'options\.json cannot be used .*JSON object'):
        ask_endpoint('x', tmp_path / 'options.json')
