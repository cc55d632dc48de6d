"""LightningModules in fragments: the weights of an undisturbed run after kills, the figures of
Lightning itself, and sentences for what is not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from parsl_freetrain import BadInput, FragmentContext, Scaled, Throughput, freetrain_app
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal, example, in_this_process, killed_and_rescaled

lightning: Any = pytest.importorskip('lightning.pytorch', reason='needs the extra lightning')

EPOCHS = 3
X = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Line(lightning.LightningModule):  # type: ignore[misc]
    """Fits a line; it writes down what is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.log('train_loss', loss, prog_bar=True)
        self.calls.append(batch_idx)
        return {'loss': loss}

    def validation_step(self, batch: Any) -> None:
        self.log_dict({'val_loss': F.mse_loss(self.layer(batch[0]), batch[1])})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append('step')

    def on_validation_epoch_end(self) -> None:
        self.calls.append('validated')

    def on_train_epoch_end(self) -> None:
        self.calls.append((self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        return {
            'optimizer': optimizer,
            'lr_scheduler': {
                'scheduler': torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total),
                'interval': 'step',
            },
        }

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*DATA[:13]), batch_size=4)


class Plateau(Line):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return {'optimizer': optimizer, 'lr_scheduler': reduce, 'monitor': 'val_loss'}


def ours(
    module: Callable[[], Any] = Line, data: Any = None, **options: Any
) -> Callable[[FragmentContext], Any]:
    def train(ctx: FragmentContext) -> Any:
        from parsl_freetrain.integrations.lightning import Trainer

        trainer = Trainer(ctx, **options)
        model = module()
        trainer.fit(model, data)
        return {'calls': [*model.calls], 'found': trainer.validate(model)}

    return train


@pytest.mark.slow
def test_killed_and_rescaled_the_example_ends_with_the_weights_of_an_undisturbed_run(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    app = example('lightning_freetrain').train
    undisturbed, weights = in_this_process(app.function, total_epochs=app.spec.total_epochs)
    outcome, cut = killed_and_rescaled(fork_server, tmp_path, app, at=80)
    assert equal(weights, cut)
    assert undisturbed.metrics == outcome.metrics and 'val_loss' in outcome.metrics


@pytest.mark.parametrize('module', [Line, Plateau])
def test_with_one_shard_it_trains_what_lightning_trains(module: type[Any], run_dir: Path) -> None:
    """Clipping, schedules by step and by metric, the order of hooks, and validation."""
    plain = module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        gradient_clip_val=0.1,
        accelerator='cpu',
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(plain)
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


def test_early_stopping_ends_the_training() -> None:
    stops = lightning.callbacks.EarlyStopping('val_loss', min_delta=1e9, patience=1)
    checkpoint, _ = in_this_process(ours(callbacks=[stops]), total_epochs=9)
    assert checkpoint.samples == 2 * 29


def test_throughput_mode_and_bfloat16() -> None:
    app = freetrain_app(total_epochs=EPOCHS, mode=Throughput())(ours(precision='bf16-mixed'))
    assert app.debug().samples == EPOCHS * 29


class Sums(Line):
    def validation_step(self, batch: Any) -> None:
        self.log('n', 1.0, reduce_fx='sum')


class OverEpochs(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log('a', 1.0, on_epoch=True)


class NoLoss(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class OwnStep(Line):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        pass


class ByHand(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class AfterBatch(Line):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Counts(Line):
    def __init__(self) -> None:
        from torchmetrics import MeanMetric

        super().__init__()
        self.mean = MeanMetric()


class TwoOptimizers(Line):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1) for _ in range(2)]


class AsksForMore(Line):
    def on_train_start(self) -> None:
        print(self.trainer.fit_loop)


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({'accumulate_grad_batches': 2}, 'Trainer(accumulate_grad_batches=2) is not supported'),
        ({'strategy': 'ddp'}, "the app's mode says how the ranks train together"),
        ({'devices': 4}, 'the app and its site choose nodes and devices'),
        ({'precision': '16-mixed'}, "say '32-true' or 'bf16-mixed'"),
        ({'limit_train_batches': 3}, 'limit_train_batches'),
        ({'gradient_clip_algorithm': 'value'}, 'gradient_clip_algorithm'),
        (
            {'max_epochs': 2},
            'trains 12 steps of 8 samples (87 samples), and the Trainer was told 8',
        ),
        ({'callbacks': 'ModelCheckpoint'}, "Trainer(best='val_loss') keeps the best"),
        ({'callbacks': 'StochasticWeightAveraging', 'swa_lrs': 0.1}, 'StochasticWeightAveraging'),
        ({'best': 'accuracy'}, "No metric 'accuracy' was logged; these were: 'learning_rate'"),
        ({'module': Sums}, "reduce_fx='sum') is not supported"),
        ({'module': OverEpochs}, 'the mean over the last global batch'),
        ({'module': NoLoss}, 'returned a NoneType without a loss'),
        ({'module': OwnStep}, 'OwnStep.optimizer_step is not supported'),
        ({'module': ByHand}, 'manual optimization in ByHand'),
        ({'module': AfterBatch}, 'AfterBatch.on_train_batch_end is not supported'),
        ({'module': Counts}, "the MeanMetric 'mean' of Counts"),
        ({'module': TwoOptimizers}, 'a module with 2 optimizers is not supported'),
        ({'module': AsksForMore}, 'trainer.fit_loop is not supported'),
        ({'data': DataLoader(DATA, 8, drop_last=True)}, 'has drop_last'),
        (
            {'data': DataLoader(DATA, 8, sampler=WeightedRandomSampler([1.0] * 29, 29))},
            'has a WeightedRandomSampler',
        ),
        ({'mode': Scaled(reference_ranks=1)}, 'mode=Scaled(...) is not supported'),
    ],
)
def test_what_is_not_supported_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    given, mode = dict(given), {}
    if 'mode' in given:
        mode['mode'] = given.pop('mode')
    if 'callbacks' in given:
        kind = getattr(lightning.callbacks, given['callbacks'])
        given['callbacks'] = [kind(**{k: given.pop(k) for k in ('swa_lrs',) if k in given})]
    with pytest.raises(BadInput) as refused:
        in_this_process(ours(**given), total_epochs=EPOCHS, **mode)
    assert sentence in str(refused.value)
    assert '\n' not in str(refused.value) and str(refused.value).endswith('.')
