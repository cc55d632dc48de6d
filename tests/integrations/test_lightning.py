"""LightningModules in fragments: Lightning's own figures, and sentences for the rest."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from parsl_freetrain import BadInput, FragmentContext, Scaled, Throughput, freetrain_app
from tests.support.examples import example, in_this_process, refused_here

EPOCHS = 3
lightning: Any = None
modules: Any = None


@pytest.fixture(scope='module', autouse=True)
def imported() -> None:
    """Here, since each worker reads this file, and only one runs it."""
    global lightning, modules
    lightning = pytest.importorskip('lightning.pytorch', reason='needs the extra lightning')
    modules = importlib.import_module('tests.integrations.lightning_modules')


def ours(
    module: str = 'Line', data: Callable[[], Any] | None = None, **options: Any
) -> Callable[[FragmentContext], Any]:
    def train(ctx: FragmentContext) -> Any:
        from parsl_freetrain.integrations.lightning import Trainer

        trainer = Trainer(ctx, **options)
        model = getattr(modules, module)()
        trainer.fit(model, data and data())
        return {'calls': [*model.calls], 'found': trainer.validate(model)}

    return train


def theirs(module: Any, **options: Any) -> Any:
    """Lightning's own Trainer, which has trained the module."""
    quiet = ('logger', 'enable_checkpointing', 'enable_progress_bar', 'enable_model_summary')
    how = {'max_epochs': EPOCHS, 'accelerator': 'cpu', 'num_sanity_val_steps': 0, **options}
    trainer = lightning.Trainer(**how, **dict.fromkeys(quiet, False))
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize('module', ['Line', 'Plateau'])
def test_with_one_shard_it_trains_what_lightning_trains(module: str, run_dir: Path) -> None:
    """Clipping, schedules by step and by metric, the order of hooks, and validation."""
    plain = getattr(modules, module)()
    trainer = theirs(plain, gradient_clip_val=0.1)
    checkpoint, weights = in_this_process(
        ours(module, max_epochs=EPOCHS, gradient_clip_val=0.1), total_epochs=EPOCHS, shards=1
    )
    for name, its in plain.state_dict().items():
        torch.testing.assert_close(weights[name], its)
    calls = [list(call) if isinstance(call, tuple) else call for call in plain.calls]
    assert checkpoint.result['calls'] == calls
    wanted = trainer.callback_metrics['val_loss'].item()
    assert checkpoint.metrics['val_loss'] == pytest.approx(wanted)
    assert checkpoint.result['found'] == [{'val_loss': pytest.approx(wanted)}]
    assert 'train_loss' in checkpoint.metrics


def test_objects_of_torchmetrics_and_a_step_and_a_log_of_ones_own(run_dir: Path) -> None:
    plain = modules.WithMetrics()
    trainer = theirs(plain)
    checkpoint, weights = in_this_process(ours('WithMetrics'), total_epochs=EPOCHS, shards=1)
    for name, its in plain.state_dict().items():
        torch.testing.assert_close(weights[name], its)
    (found,) = checkpoint.result['found']
    for name in ('own_error', 'own_ranks', 'own_level_epoch', 'own_collected'):
        assert checkpoint.metrics[name] == pytest.approx(trainer.callback_metrics[name].item())
    assert found['own_error'] == checkpoint.metrics['own_error']
    assert 'own_train_error' in checkpoint.metrics


def test_early_stopping_ends_the_training() -> None:
    class Counts(lightning.Callback):  # type: ignore[misc]
        steps = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.steps += 1

    stops = lightning.callbacks.EarlyStopping('val_loss', min_delta=1e9, patience=1)
    checkpoint, _ = in_this_process(ours(callbacks=[stops, counts := Counts()]), total_epochs=9)
    assert checkpoint.samples == 2 * 29
    assert counts.steps == 2 * 4


@pytest.mark.parametrize('precision', ['bf16-mixed', '16-mixed'])
def test_throughput_mode_and_16_bits(precision: str) -> None:
    app = freetrain_app(total_epochs=EPOCHS, mode=Throughput())(ours(precision=precision))
    assert app.debug().samples == EPOCHS * 29


def test_a_sampler_and_drop_last_are_those_of_the_loader() -> None:
    how: dict[str, Any] = {'sampler': WeightedRandomSampler([1.0] * 29, 20), 'drop_last': True}
    train = ours(data=lambda: DataLoader(modules.DATA, 8, **how), max_epochs=EPOCHS)
    checkpoint, _ = in_this_process(train, total_epochs=EPOCHS)
    assert checkpoint.samples == EPOCHS * 16


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({'strategy': 'ddp'}, "the app's mode says how the ranks train together"),
        ({'devices': 4}, 'the app and its site choose nodes and devices'),
        ({'precision': '64-true'}, "say '32-true' or 'bf16-mixed' or '16-mixed'"),
        ({'limit_train_batches': 3}, 'limit_train_batches'),
        ({'gradient_clip_algorithm': 'value'}, 'gradient_clip_algorithm'),
        (
            {'max_epochs': 2},
            'trains 12 steps of 8 samples (87 samples), and the Trainer was told 8',
        ),
        ({'callbacks': 'ModelCheckpoint'}, "Trainer(best='val_loss') keeps the best"),
        ({'callbacks': 'StochasticWeightAveraging', 'swa_lrs': 0.1}, 'or an AveragedModel of torc'),
        ({'callbacks': 'TQDMProgressBar'}, 'TQDMProgressBar is not supported by parsl_freetrain.i'),
        ({'callbacks': 'LambdaCallback', 'on_train_batch_end': print}, 'on_train_batch_end of the'),
        ({'best': 'accuracy'}, "No metric 'accuracy' was logged; these were: 'learning_rate'"),
        ({'module': 'Sums'}, "reduce_fx='sum') is not supported"),
        ({'module': 'OfMetrics'}, 'log numbers, or the object in an evaluation'),
        ({'module': 'Appends'}, 'reads self.losses, to which training steps append'),
        ({'module': 'NoLoss'}, 'returned a NoneType without a loss'),
        ({'module': 'OwnStep'}, 'ended with gradients that were not used'),
        ({'module': 'ByHand'}, 'manual optimization in ByHand'),
        ({'module': 'AfterBatch'}, 'AfterBatch.on_train_batch_end is not supported'),
        ({'module': 'TwoOptimizers'}, 'a module with 2 optimizers is not supported'),
        ({'module': 'AsksForMore'}, 'trainer.fit_loop is not supported'),
        ({'mode': Scaled(reference_ranks=1)}, 'mode=Scaled(...) is not supported'),
    ],
)
def test_what_is_not_supported_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    given, mode = dict(given), {}
    if 'mode' in given:
        mode['mode'] = given.pop('mode')
    if 'callbacks' in given:
        kind = getattr(lightning.callbacks, given['callbacks'])
        given['callbacks'] = [
            kind(**{k: given.pop(k) for k in ('swa_lrs', 'on_train_batch_end') if k in given})
        ]
    said = refused_here(ours(**given), total_epochs=EPOCHS, **mode)
    assert sentence in said and said.endswith('.')


SCRIPT = """
import json, sys
import torch
from lightning.pytorch import Trainer, callbacks, loggers
from tests.integrations.lightning_modules import Line

class Best(Line):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()

quiet = dict.fromkeys(('enable_progress_bar', 'enable_model_summary'), False)
trainer = Trainer(
    max_epochs=6, callbacks=[callbacks.ModelCheckpoint('kept', 'best', monitor='val_loss')],
    logger=loggers.CSVLogger('.', 'csv', ''), accelerator='auto', num_sanity_val_steps=0,
    gradient_clip_val=0, **quiet,
)
model = Best()
trainer.fit(model)
before = [one.clone() for one in model.parameters()]
(found,) = trainer.validate(model, ckpt_path='best')
best = Best.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
assert best.hparams.width == 3
torch.save([found, float(trainer.checkpoint_callback.best_model_score), best.state_dict()], 'found')
"""


@pytest.mark.parametrize('bare', [False, True], ids=['with its Trainer', 'and exit'])
def test_a_script_with_a_trainer(
    bare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script = example('lightning_command').run_script
    script, found = tmp_path / 'script.py', []
    script.write_text(SCRIPT + bare * 'sys.exit(3)')
    for folder in ('own', 'theirs'):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        if folder == 'own' and bare:
            with pytest.raises(BadInput, match='has ended with 3'):
                in_this_process(lambda ctx: run_script(ctx, script), total_epochs=6, shards=1)
            return
        if folder == 'own':
            in_this_process(lambda ctx: run_script(ctx, script), total_epochs=6, shards=1)
            assert len(Path('csv/metrics.csv').read_text().splitlines()) == 7
        else:
            runpy.run_path(str(script), run_name='__main__')  # Lightning's Trainer is its own again
        assert [one.name for one in Path('kept').iterdir()] == ['best.ckpt']
        found.append(torch.load('found'))
    torch.testing.assert_close(*found)
    assert found[0][0] == {'val_loss': pytest.approx(found[0][1])}
    with pytest.raises(BadInput, match=r"given 'spktrian', which is neither a file nor a command"):
        run_script(None, 'spktrian')
