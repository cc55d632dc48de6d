"""Searches over settings: the rules that drop settings, and trainers that are dropped."""

import math
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.utils.data import TensorDataset

import parsl_freetrain
from parsl_freetrain import BadInput, FragmentContext, LocalSite, TrainerFailed, freetrain_app
from parsl_freetrain.tuning.optuna import optimize
from parsl_freetrain.tuning.space import Uniform, drawn_from, settings_of
from tests.support.training import freetrain


@pytest.mark.parametrize(('low', 'high'), [(1, 1), (0, math.inf), (math.nan, 1), ('0', 1)])
def test_an_empty_or_endless_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(BadInput, match='must be finite numbers, and low less than high'):
        Uniform(low, high)


def test_settings_of_a_space() -> None:
    space: dict[str, Any] = {'lr': Uniform(1e-4, 1e-1, log=True), 'width': [16, 64]}
    drawn = drawn_from(space)(optuna.create_study().ask())
    assert 1e-4 <= drawn['lr'] <= 1e-1 and drawn['width'] in (16, 64)
    assert settings_of({'a': [1, 2], 'b': [3]}) == [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    assert settings_of([{'a': 1}]) == [{'a': 1}]


def train(ctx: FragmentContext, setting: dict[str, Any]) -> None:
    """The metric is the setting's; a bad one trains until it is dropped."""
    model = torch.nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def end_of_epoch() -> None:
        if not setting.get('silent'):
            ctx.report(score=setting['score'] - ctx.epoch)

    ctx.each_epoch(end_of_epoch)
    for (x,) in ctx.loop(TensorDataset(torch.ones(4, 1)), 4):
        while setting['score'] > 50 and ctx.epoch >= 2 and not ctx.should_stop():
            time.sleep(0.05)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        ({'space': {}}, 'tune: the space has no settings.'),
        ({'space': []}, 'tune: the space has no settings.'),
        ({'space': {'score': Uniform(0, 1)}}, "'score' is a range: say how many trials"),
        ({'space': {'score': 'sgd'}}, "space['score'] is 'sgd'; it must be a list"),
        ({'space': {'score': 0.1}}, "space['score'] is 0.1"),
        ({'space': {'score': []}, 'trials': 2}, "the choices for 'score' are []"),
        ({'mode': 'least'}, "mode is 'least'"),
        ({'algorithm': 'grid'}, "algorithm is 'grid'; it must be 'asha' or 'hyperband'"),
        ({'factor': 1}, 'factor is 1'),
        ({'factor': 2.5}, 'factor is 2.5; it must be a whole number, at least 2'),
        ({'at_once': 0}, 'at_once is 0'),
        ({'at_once': 1.5}, 'at_once is 1.5'),
        ({'trials': 0}, 'trials is 0'),
        ({'space': 'score'}, "space is 'score'; it must be a dict"),
        ({'space': [{'score': 1.0}], 'trials': 3}, 'are all trained; trials=3 is for a space from'),
        ({'app': freetrain_app(total_samples=9)(train)}, 'a whole number of total_epochs'),
    ],
)
def test_what_cannot_be_searched_is_a_sentence(options: dict[str, Any], sentence: str) -> None:
    app = freetrain_app(total_epochs=4)(train)
    given = {'space': {'score': [1.0]}, **options}
    with pytest.raises(BadInput) as refused:
        parsl_freetrain.tune(given.pop('app', app), given.pop('space'), **given)
    assert sentence in str(refused.value)


def test_dropped_trainers_give_back_their_nodes_and_best_setting_is_found(tmp_path: Path) -> None:
    app = freetrain_app(total_epochs=4)(train)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):
        space = [{'score': score} for score in (4.0, 2.0, 99.0, 88.0)]
        # The first two go on. Each of the others would keep the only node for ever.
        found = parsl_freetrain.tune(app, space, metric='score', factor=2, at_once=2)
        assert found.best.setting == {'score': 2} and found.best.values == {1: 2, 2: 1, 4: -1}
        assert [trial.dropped for trial in found.trials] == [False, False, True, True]
        assert found.trials[2].values[1] == 99.0 and 4 not in found.trials[2].values
        assert found.best.checkpoint is not None and found.best.checkpoint.samples == 16
        # Another search does not go on from what was trained with other settings.
        other = parsl_freetrain.tune(app, [{'score': 7.0}], metric='score')
        assert other.best.values == {1: 7.0, 3: 5.0, 4: 4.0}
        silent = freetrain_app(total_epochs=1)(train)
        silent.name = 'silent'
        with pytest.raises(TrainerFailed, match='no setting was trained') as failed:
            parsl_freetrain.tune(silent, [{'score': 0.0, 'silent': True}], metric='score')
        assert "'score', which was not reported before the end of" in str(failed.value.__cause__)
        _with_optuna(app)


def _with_optuna(app: Any) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=50))
    for score in (70.0, 3.0):
        study.enqueue_trial({'score': score})
    renamed = freetrain_app(total_epochs=4)(train)
    renamed.name = 'asked'
    bad: Any
    for bad in ([{'score': 1.0}], {'score': 'all'}):
        with pytest.raises(BadInput, match='must be'):
            optimize(study, renamed, bad, trials=2, metric='score')
    found = optimize(
        study,
        renamed,
        lambda trial: {'score': trial.suggest_float('score', 0, 100)},
        trials=2,
        metric='score',
    )
    assert found.best.setting == {'score': 3.0} == study.best_params
    assert [trial.state.name for trial in study.trials] == ['PRUNED', 'COMPLETE']
    assert study.best_value == 0.0
