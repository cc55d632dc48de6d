"""Hugging Face's Trainer in fragments: its own figures, and sentences for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parsl_freetrain import FragmentContext, Scaled, Throughput, freetrain_app
from tests.support.examples import in_this_process, refused_here

transformers: Any = None
EPOCHS = 2


@pytest.fixture(scope='module', autouse=True)
def imported() -> None:
    """Here, since each worker reads this file, and only one runs it."""
    global transformers
    transformers = pytest.importorskip('transformers', reason='needs the extra transformers')


def dataset(size: int = 22) -> list[dict[str, Any]]:
    words = torch.randint(0, 16, (size, 5), generator=torch.Generator().manual_seed(1))
    return [{'input_ids': row, 'labels': row.sum() % 2} for row in words]


def network() -> Any:
    torch.manual_seed(0)
    size = {'vocab_size': 16, 'hidden_size': 8, 'intermediate_size': 8}
    depth = {'num_hidden_layers': 1, 'num_attention_heads': 2}
    none = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    config = transformers.BertConfig(**size, **depth, **none)
    return transformers.BertForSequenceClassification(config)


def arguments(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        'num_train_epochs': EPOCHS,
        'per_device_train_batch_size': 4,
        'learning_rate': 0.01,
    }
    given |= {'max_grad_norm': 0.1, 'warmup_steps': 3, 'train_sampling_strategy': 'sequential'}
    given |= {'eval_strategy': 'epoch', 'report_to': 'none', 'disable_tqdm': True, 'use_cpu': True}
    return transformers.TrainingArguments(str(folder), **given | changes)


def accuracy(found: Any) -> dict[str, float]:
    return {'accuracy': (found.predictions.argmax(-1) == found.label_ids).mean()}


def ours(
    folder: Path, kind: type[Any] | None = None, callbacks: Any = None, **changes: Any
) -> Callable[[FragmentContext], Any]:
    def train(ctx: FragmentContext) -> Any:
        from parsl_freetrain.integrations.transformers import InFragments, Trainer

        both = Trainer if kind is None else type(kind.__name__, (InFragments, kind), {})
        data = {'train_dataset': dataset(), 'eval_dataset': dataset(7)}
        how = {'compute_metrics': accuracy, 'callbacks': callbacks}
        trainer = both(ctx, network(), arguments(folder, **changes), **data, **how)
        trainer.train()
        return trainer.evaluate()

    return train


class Averaging(torch.optim.SGD):
    """As a schedule-free optimizer, it trains other weights than those that are evaluated."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]['params']:
            mean = self.state[p].setdefault('mean', torch.zeros_like(p))
            mean.lerp_(p.detach(), 0.5)

    def change(self, trains: bool) -> None:
        if self.param_groups[0].setdefault('trains', True) != trains:
            self.param_groups[0]['trains'] = trains
            for p, its in self.state.items():
                p.data, its['mean'] = its['mean'].clone(), p.data.clone()

    def train(self) -> None:
        self.change(True)

    def eval(self) -> None:
        self.change(False)


def averaging() -> Any:
    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = Averaging(self.model.parameters(), lr=0.1)
            return self.optimizer

    return Trainer


def own_ways() -> Any:
    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            how = {'sampler': range(21, -1, -2), 'collate_fn': self.data_collator}
            return torch.utils.data.DataLoader(self.train_dataset, 2, **how)

        def evaluation_loop(self, *args: Any, **given: Any) -> Any:
            found = super().evaluation_loop(*args, **given)
            found.metrics['eval_accuracy'] += 1.0
            return found

    return Trainer


@pytest.mark.parametrize(
    'make',
    [lambda: None, pytest.param(averaging, marks=pytest.mark.long), own_ways],
    ids=['plain', 'averaging', 'own ways'],
)
def test_with_one_shard_it_trains_what_transformers_trains(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Clipping, warm-up, schedule, the last batch of an epoch, and evaluation."""
    kind = make()
    given = {'train_dataset': dataset(), 'eval_dataset': dataset(7), 'compute_metrics': accuracy}
    plain = (kind or transformers.Trainer)(network(), arguments(tmp_path), **given)
    plain.train()
    wanted = plain.evaluate()
    checkpoint, weights = in_this_process(ours(tmp_path, kind), total_epochs=EPOCHS, shards=1)
    if make is own_ways:
        assert checkpoint.samples == EPOCHS * 11
    for name, its in plain.model.state_dict().items():
        torch.testing.assert_close(weights[name], its)
    for name in ('eval_loss', 'eval_accuracy'):
        assert checkpoint.result[name] == pytest.approx(wanted[name])


def test_early_stopping_ends_the_training(tmp_path: Path) -> None:
    stops = transformers.EarlyStoppingCallback(1, early_stopping_threshold=1e9)
    checkpoint, _ = in_this_process(
        ours(tmp_path, None, [stops], num_train_epochs=9, metric_for_best_model='loss'),
        total_epochs=9,
    )
    assert checkpoint.samples == 2 * 22


def callback(name: str, **has: Any) -> Callable[[], Any]:
    """Makes a callback of its own class, when transformers has been imported."""
    return lambda: [type(name, (transformers.TrainerCallback,), has)()]


def with_an_average(self: Any) -> None:
    self.average = torch.nn.Linear(1, 1)


def says_save(_: Any, args: Any, state: Any, control: Any, **__: Any) -> Any:
    return dataclasses.replace(control, should_save=True)


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({'resume_from_checkpoint': 'there'}, 'by itself'),
        (
            {'load_best_model_at_end': True, 'save_strategy': 'epoch'},
            'TrainingArguments(load_best_model_at_end=True) is not supported',
        ),
        ({'torch_compile': True}, 'TrainingArguments(torch_compile=True) is not supported'),
        ({'train_sampling_strategy': 'group_by_length'}, "say 'random' or 'sequential'"),
        ({'dataloader_drop_last': True}, 'the last batch of an epoch'),
        ({'neftune_noise_alpha': 1.0}, 'neftune_noise_alpha'),
        ({'eval_strategy': 'steps'}, "(eval_strategy='steps') is not supported"),
        ({'num_train_epochs': 3}, 'trains 12 steps of 4 samples (44 samples), and TrainingArgu'),
        ({'max_steps': 3}, 'says 3 (max_steps=3'),
        (
            {'metric_for_best_model': 'accuracy', 'greater_is_better': True},
            "Checkpoints(keep=Retention(mode='max'))",
        ),
        (
            {'kind': averaging, 'metric_for_best_model': 'loss'},
            'evaluates an average of the weights, which a checkpoint would not hold',
        ),
        ({'lr_scheduler_type': 'reduce_lr_on_plateau'}, 'scheduler ReduceLROnPlateau'),
        (
            {'callbacks': callback('Unknown', on_step_begin=lambda *_, **__: None)},
            'The callback Unknown has on_step_begin',
        ),
        (
            {'callbacks': callback('Averages', __init__=with_an_average)},
            'The callback Averages has a model of its own (average)',
        ),
        ({'callbacks': callback('Saves', on_step_end=says_save)}, 'a callback that sets should_sa'),
        ({'mode': Scaled(reference_ranks=1)}, 'mode=Scaled(...) is not supported'),
    ],
)
def test_what_is_not_supported_is_a_sentence(
    tmp_path: Path, given: dict[str, Any], sentence: str
) -> None:
    given = {name: value() if callable(value) else value for name, value in given.items()}
    mode = {}
    if 'mode' in given:
        mode['mode'] = given.pop('mode')
    said = refused_here(ours(tmp_path, **given), total_epochs=EPOCHS, **mode)
    assert sentence in said and said.endswith('.')


def test_throughput_mode_trains_too(tmp_path: Path) -> None:
    app = freetrain_app(total_epochs=EPOCHS, mode=Throughput())(
        ours(tmp_path, bf16=True, ddp_timeout=600)
    )
    assert app.debug().samples == EPOCHS * 22
