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

from parsl_freetrain.app import Retention, Scaled, Shape, freetrain_app
from parsl_freetrain.cli.endpoint import ask_endpoint, of_endpoint
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.executor import orders
from parsl_freetrain.executor.orders import Order, compare, describe, described, refuse_differences, versions_here
from parsl_freetrain.executor.payload import pack
from parsl_freetrain.executor.requirements import modules_needed


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


@pytest.mark.parametrize(('function', 'arguments', 'needed'), [
    (train, (), {'joblib', 'pandas'}),
    (quiet, (), set()),
    (quiet, (numpy.float32(1), {'deep': [numpy.zeros(3)]}), {'numpy'}),
    (joblib.dump, (), {'joblib'}),
])
def test_modules_that_are_needed(function: Callable[..., Any], arguments: tuple[Any, ...], needed: set[str]) -> None:
    found = set(modules_needed(function, pack(function, arguments, {}, 'trainer')))
    assert needed <= found
    assert found <= needed | {'cloudpickle', 'numpy'} - ({'numpy'} if function is quiet and not arguments else set())


@pytest.mark.parametrize('settings', [
    {'total_samples': 100},
    {'total_epochs': 2.5, 'max_nodes': 4, 'scaling': {1: 1.0, 4: 3.0}, 'keep_checkpoints': Retention(2, 5, 'loss'), 'retries': 0},
    {'total_samples': 9, 'shapes': {1: Shape(), 2: Shape(spatial=(1, 2, 1))}, 'mode': 'throughput', 'finish_by': 1e9, 'user': 'anna',
     'efficiency': {1: 1.0, 2: 0.5}},
    {'total_epochs': 1, 'sizes': [2, 4], 'group': 'physics'},
    {'total_epochs': 1, 'mode': 'scaled', 'scaled': Scaled(lr='sqrt'), 'on_nan': 'skip', 'priority': 2.0},
])
def test_a_description_is_json_and_says_everything(settings: dict[str, Any]) -> None:
    app = freetrain_app(**{k: v for k, v in settings.items() if k != 'retries'})(quiet)
    trainer, terms = app.settings.trainer('quiet'), app.settings.terms('/far/quiet')
    order = Order('train', 'quiet', 'r1', versions=versions_here(), modules=('torch',),
                  description=describe(trainer, app.settings.terms('/near'), app.identity(), None))
    again = Order.from_json(order.to_json())
    assert again == Order(**{**vars(order), 'description': json.loads(json.dumps(order.description))})
    assert described(again.description, '/far/quiet') == (trainer, terms)
    assert again.description['identity'] == app.identity()


@pytest.mark.parametrize('wrong', [None, 'no json', '[]', '{"verb": "train", "speed": 3}', '{}'])
def test_an_order_of_another_version_is_bad_input(wrong: Any) -> None:
    with pytest.raises(BadInput, match='does not understand this order: install the same version'):
        Order.from_json(wrong)


@pytest.mark.parametrize('change', [{'terms': {'speed': 1}}, {'trainer': {'curve': 3}}, {'terms': {'keep_checkpoints': {'last': 0}}}])
def test_a_description_that_cannot_be_used_is_bad_input(change: dict[str, dict[str, Any]]) -> None:
    app = freetrain_app(total_samples=1)(quiet)
    right = describe(app.settings.trainer('quiet'), app.settings.terms(''), app.identity(), None)
    with pytest.raises(BadInput):
        described({**right, **{k: {**right[k], **v} for k, v in change.items()}}, '/far')


def test_versions_fit_if_what_matters_is_the_same() -> None:
    there = {'python': '3.11.2', 'parsl-freetrain': '2026.11.21', 'parsl': '2026.10.26', 'dill': '0.3.9', 'cloudpickle': '3.1.2',
             'torch': '2.13.0+cu126'}
    here = {**there, 'python': '3.11.7', 'torch': '2.13.0+cpu', 'cloudpickle': '3.0.0'}
    refuse_differences(here, there)
    refuse_differences({k: v for k, v in here.items() if k != 'torch'}, there)      # a laptop may do without
    for name, version in (('python', '3.12.2'), ('parsl-freetrain', '2026.11.22'), ('dill', '0.4.1'), ('torch', '2.12.0')):
        with pytest.raises(BadInput, match=f'{name} is .* here and {version} at the endpoint; install'):
            refuse_differences(here, {**there, name: version})
    with pytest.raises(BadInput, match='torch is .* here and - at the endpoint'):
        refuse_differences(here, {k: v for k, v in there.items() if k != 'torch'})
    assert [asdict(c)['name'] for c in compare(here, there)] == list(orders.COMPARED)


def test_the_doctor_says_what_keeps_an_endpoint_from_being_asked(tmp_path: Path) -> None:
    if importlib.util.find_spec('globus_compute_sdk') is None:
        found = of_endpoint(ask_endpoint('x', None))
        assert found.state == 'bad'
        assert 'Globus Compute SDK, which is not installed here: pip install' in found.says
    (tmp_path / 'options.json').write_text('[1]')
    with pytest.raises(BadInput, match=r'options\.json cannot be used .*JSON object'):
        ask_endpoint('x', tmp_path / 'options.json')
