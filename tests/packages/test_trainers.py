"""As test_packages.py: trainers and modules of packages, and models of more fields."""

from __future__ import annotations

# mypy: ignore-errors
# The packages are not installed where types are checked.
import copy
import json
import os
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.packages.test_packages import (
    Rows,
    gpt,
    numbers,
    row,
    same_bits,
    small,
    squared,
    train,
    with_adam,
)
from tests.support.examples import example

ROWS: Rows = {}
FILES = {one.name: one.read_text() for one in Path(__file__).parent.glob('*.[ty][xa]*')}


def words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = models.WordLevel({f'w{i}': i for i in range(64)}, unk_token='w0')
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='w1', eos_token='w2', mask_token='w3'
    )


def tokens(size: int = 48) -> list[list[int]]:
    made = torch.Generator().manual_seed(0)
    return torch.randint(5, 64, (size, 12), generator=made).tolist()


def fragments_of(kind: Any) -> Any:
    from parsl_freetrain.integrations.transformers import InFragments

    return type(kind.__name__, (InFragments, kind), {})


HOW: Any = {'num_train_epochs': 2, 'per_device_train_batch_size': 8, 'report_to': 'none'}


@row('transformers', ROWS)
def transformers_masked_language_model(ctx: FragmentContext) -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    size = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    fragments_of(Trainer)(
        ctx,
        model=BertForMaskedLM(BertConfig(vocab_size=64, intermediate_size=32, **size)),
        args=TrainingArguments('o', gradient_accumulation_steps=2, **HOW),
        train_dataset=[{'input_ids': one} for one in tokens()],
        data_collator=DataCollatorForLanguageModeling(words(), mlm_probability=0.3, seed=1),
    ).train()


@row('transformers', ROWS)
def transformers_seq2seq(ctx: FragmentContext) -> None:
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    config = T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=1, pad_token_id=1, eos_token_id=2,
    )  # fmt: skip
    pairs = [{'input_ids': one, 'labels': one[:6]} for one in tokens()]
    made = []
    fragments_of(Seq2SeqTrainer)(
        ctx,
        model=T5ForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            'o', eval_strategy='epoch', predict_with_generate=True, generation_max_length=8, **HOW
        ),
        train_dataset=pairs,
        eval_dataset=pairs[:12],
        compute_metrics=lambda found: made.append(found.predictions.shape) or {'n': len(made)},
    ).train()
    if not ctx.stopped:
        assert made[-1][0] == 12


@row('trl', ROWS)
def trl_sft_command(ctx: FragmentContext) -> None:
    """``trl sft`` as it is."""
    os.environ['HF_HOME'] = os.path.abspath('cache')
    from parsl_freetrain.integrations.transformers import run_script

    if ctx.is_main:
        gpt().save_pretrained('base')
        words().save_pretrained('base')
        lines = [{'text': ' '.join(f'w{i}' for i in one)} for one in tokens()]
        Path('texts').mkdir(exist_ok=True)
        Path('texts/train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    ctx._run.peers.all_reduce_max((0,))()
    how = {
        'model_name_or_path': 'base', 'dataset_name': 'texts', 'output_dir': 'o', 'bf16': 'False',
        'gradient_checkpointing': 'False', 'dtype': 'float32', **HOW,
    }  # fmt: skip
    said = [part for name, value in how.items() for part in (f'--{name}', str(value))]
    run_script(ctx, 'trl', 'sft', *said)
    assert not ctx.is_main or Path('o/model.safetensors').exists()


@row('trl', ROWS)
def trl_dpo(ctx: FragmentContext) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    texts = [[f'w{i}' for i in one] for one in tokens()]
    pairs = [
        {'prompt': ' '.join(one[:4]), 'chosen': ' '.join(one[4:8]), 'rejected': ' '.join(one[8:])}
        for one in texts
    ]
    model = gpt()
    fragments_of(DPOTrainer)(
        ctx,
        model=model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig('o', bf16=False, gradient_checkpointing=False, **HOW),
        train_dataset=Dataset.from_list(pairs),
        processing_class=words(),
    ).train()


@row('sentence_transformers', ROWS)
def sentence_transformers_trainer(ctx: FragmentContext) -> None:
    """The loss has parameters of its own, and there is an evaluator of the package."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers import models
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.losses import SoftmaxLoss
    from transformers import BertConfig, BertModel

    size = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2}
    if ctx.is_main:
        BertModel(BertConfig(vocab_size=64, intermediate_size=32, **size)).save_pretrained('bert')
        words().save_pretrained('bert')
    ctx._run.peers.all_reduce_max((0,))()
    bert = models.Transformer('bert', max_seq_length=12)
    model = st.SentenceTransformer(modules=[bert, models.Pooling(16)], device='cpu')
    said = [' '.join(f'w{i}' for i in one) for one in tokens()]
    pairs = {'anchor': said, 'other': said[::-1], 'label': [i % 3 for i in range(48)]}
    figures = [i % 7 / 7 for i in range(24)]
    trainer = fragments_of(st.SentenceTransformerTrainer)(
        ctx,
        model=model,
        args=st.SentenceTransformerTrainingArguments('o', eval_strategy='epoch', **HOW),
        train_dataset=Dataset.from_dict(pairs),
        loss=SoftmaxLoss(model, 16, 3),
        evaluator=EmbeddingSimilarityEvaluator(said[:24], said[24:], figures, name='sts'),
    )
    trainer.train()
    if not ctx.stopped:
        assert 'eval_sts_spearman_cosine' in trainer.state.log_history[-1]


@row('schnetpack', ROWS)
def spktrain(ctx: FragmentContext) -> None:
    """The script as it is."""
    from torch.utils.data import dataloader

    dataloader.T_co = typing.TypeVar('T_co')  # which 2.1.1 imports, and torch 2.13 has no longer
    os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'  # it saves its model in a checkpoint
    import ase
    import numpy as np
    import schnetpack as spk

    made = np.random.default_rng(0)
    if ctx.is_main and not Path('atoms.db').exists():
        new = spk.data.ASEAtomsData.create(
            'atoms.db', distance_unit='Ang', property_unit_dict={'energy': 'eV'}
        )
        for _ in range(60):
            n = int(made.integers(3, 6))
            atoms = ase.Atoms('H' * n, made.normal(size=(n, 3)) * 2)
            new.add_system(atoms, energy=np.array([atoms.positions.std()]))
        Path('experiment').mkdir()
        Path('experiment/tiny.yaml').write_text(FILES['spktrain.yaml'])
    ctx._run.peers.all_reduce_max((0,))()
    runs = Path(ctx._run.order.store).parent.name
    how = 'experiment=tiny', f'run.id={runs}', '~task.scheduler_args.smoothing_factor'
    example('lightning_command').run_script(ctx, 'spktrain', '--config-dir', os.getcwd(), *how)
    if ctx.is_main:
        assert Path('runs', runs, 'best_model').exists()
        assert [*Path('runs', runs, 'csv').glob('*/metrics.csv')]


@row('nequip', ROWS)
def nequip_train(ctx: FragmentContext) -> None:
    """The script as it is."""
    import ase.io
    import numpy as np
    from ase.calculators.singlepoint import SinglePointCalculator

    made, frames = np.random.default_rng(0), []
    for _ in range(48):
        atoms = ase.Atoms('HHH', made.normal(size=(3, 3)))
        atoms.calc = SinglePointCalculator(
            atoms, energy=float(atoms.positions.std()), forces=np.zeros((3, 3))
        )
        frames.append(atoms)
    if ctx.is_main:
        ase.io.write('frames.xyz', frames)
        Path('config.yaml').write_text(FILES['nequip_train.yaml'])
    ctx._run.peers.all_reduce_max((0,))()
    where = '-cd', os.getcwd(), '-cn', 'config', 'hydra.run.dir=out'
    example('lightning_command').run_script(ctx, 'nequip-train', *where)
    assert Path('out/best.ckpt').exists()


@row('jsonargparse', ROWS)
def lightning_cli(ctx: FragmentContext) -> None:
    """A script with LightningCLI as it is: ``python cli.py fit``."""
    if ctx.is_main:
        Path('cli.py').write_text(FILES['lightning_cli.txt'])
        Path('config.yaml').write_text(FILES['lightning_cli.yaml'])
    ctx._run.peers.all_reduce_max((0,))()
    example('lightning_command').run_script(ctx, 'cli.py', 'fit', '--config', 'config.yaml')
    assert Path('out/best.ckpt').exists()


@row('pytorch_forecasting', ROWS)
def pytorch_forecasting_mlp(ctx: FragmentContext) -> None:
    import pandas
    from pytorch_forecasting import DecoderMLP, TimeSeriesDataSet

    from parsl_freetrain.integrations.lightning import Trainer

    x, _ = numbers().tensors
    table = pandas.DataFrame({
        'time': [*range(12)] * 32, 'series': [str(i // 12) for i in range(384)],
        'value': x.flatten().numpy(),
    })  # fmt: skip
    series = TimeSeriesDataSet(
        table, 'time', 'value', ['series'], max_encoder_length=6, max_prediction_length=2,
        time_varying_unknown_reals=['value'], time_varying_known_reals=['time'],
    )  # fmt: skip
    loaders = [series.to_dataloader(train=t, batch_size=16, drop_last=False) for t in (True, False)]
    model = DecoderMLP.from_dataset(series, hidden_size=8, n_hidden_layers=1, log_interval=-1)
    Trainer(ctx, max_epochs=2).fit(model, *loaders)


@row('zuko', ROWS)
def zuko_flow(ctx: FragmentContext) -> None:
    import zuko

    flow = zuko.flows.NSF(8, transforms=1, hidden_features=(16,))
    train(ctx, flow, numbers(), lambda m, b: -m().log_prob(b[0]).mean())


@row('diffusers', ROWS)
def diffusers_unet(ctx: FragmentContext) -> None:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1,
        block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=('DownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'UpBlock2D'),
    )  # fmt: skip
    noises = DDPMScheduler(100)
    images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        noise, times = torch.randn_like(batch[0]), torch.randint(0, 100, (len(batch[0]),))
        return F.mse_loss(model(noises.add_noise(batch[0], noise, times), times).sample, noise)

    train(ctx, model, TensorDataset(images), loss)


@row('torchsde', ROWS)
def torchsde_latent(ctx: FragmentContext) -> None:
    import torchsde

    class Sde(nn.Module):
        noise_type, sde_type = 'diagonal', 'ito'

        def __init__(self) -> None:
            super().__init__()
            self.drift = nn.Linear(8, 8)

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.drift(y)

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return 0.1 * torch.ones_like(y)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        end = torchsde.sdeint(model, batch[0], torch.tensor([0.0, 0.2]), dt=0.1)[-1]
        return F.mse_loss(end.sum(1, keepdim=True), batch[1])

    train(ctx, Sde(), numbers(), loss)


@row('pyro', ROWS)
def pyro_svi(ctx: FragmentContext) -> None:
    import pyro
    from pyro import distributions as dist
    from pyro.infer import Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn import PyroModule, PyroSample

    class Line(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = PyroSample(dist.Normal(torch.zeros(8), 1.0).to_event(1))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            mean = x @ self.weight
            with pyro.plate('data', 48, subsample=x):
                return pyro.sample('y', dist.Normal(mean, 0.5), obs=y)

    model = Line()
    guide, data = AutoNormal(model), numbers()
    elbo = Trace_ELBO()(model, guide)
    ctx.warm_up(lambda: elbo(data.tensors[0][:8], data.tensors[1][:8, 0]))  # makes the guide
    train(ctx, elbo, data, lambda m, b: m(b[0], b[1][:, 0]))


def averaged(ctx: FragmentContext, make: Any) -> None:
    model, optimizer = ctx.prepare(*with_adam(small()))
    ctx.after_step(ctx.keep(make(model)).update)
    for batch in ctx.loop(numbers(), 8):
        optimizer.zero_grad()
        squared(model, batch).backward()
        optimizer.step()


@row('torch_ema', ROWS)
def torch_ema_average(ctx: FragmentContext) -> None:
    from torch_ema import ExponentialMovingAverage

    averaged(ctx, lambda model: ExponentialMovingAverage(model.parameters(), 0.9))


@row('ema_pytorch', ROWS)
def ema_pytorch_average(ctx: FragmentContext) -> None:
    from ema_pytorch import EMA

    averaged(ctx, lambda model: EMA(model, beta=0.9, update_after_step=2, update_every=2))


@row('pytorch_metric_learning', ROWS)
def metric_learning_arcface(ctx: FragmentContext) -> None:
    from pytorch_metric_learning.losses import ArcFaceLoss
    from pytorch_metric_learning.samplers import MPerClassSampler

    data = TensorDataset(numbers().tensors[0], torch.arange(48) % 6)
    both = nn.ModuleList([nn.Linear(8, 6), ArcFaceLoss(6, 6)])
    sampler = MPerClassSampler(data.tensors[1], 2, 8, length_before_new_iter=48)
    loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)
    train(ctx, both, loader, lambda m, b: m[1](m[0](b[0]), b[1]), batch_size=None)


@row('kornia', ROWS)
def kornia_augmentation(ctx: FragmentContext) -> None:
    from kornia import augmentation as k

    steps = k.RandomHorizontalFlip(), k.ColorJitter(0.2, 0.2, 0.2, 0.1), k.RandomAffine(20.0)
    augment = k.AugmentationSequential(*steps, data_keys=['input'])
    x = torch.rand(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
    data = TensorDataset(x, x.mean((1, 2, 3))[:, None])
    train(ctx, model, data, lambda m, b: F.mse_loss(m(augment(b[0])), b[1]))


@row('x_transformers', ROWS)
def x_transformers_decoder(ctx: FragmentContext) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=1, heads=2, rotary_pos_emb=True, attn_dim_head=8)
    net = TransformerWrapper(num_tokens=64, max_seq_len=12, attn_layers=layers)
    train(
        ctx, AutoregressiveWrapper(net), TensorDataset(torch.tensor(tokens())), lambda m, b: m(b[0])
    )


@row('mace', ROWS)
def mace_run_train(ctx: FragmentContext) -> None:
    """The script as it is."""
    import ase.io
    import numpy as np

    made, frames = np.random.default_rng(0), []
    for _ in range(60):
        atoms = ase.Atoms('HHH', made.normal(size=(3, 3)))
        atoms.info['energy_set'] = float(atoms.positions.std())
        atoms.arrays['forces_set'] = np.zeros((3, 3))
        frames.append(atoms)
    where = Path(ctx._run.order.store).parent.name
    if ctx.is_main:
        ase.io.write('frames.xyz', frames)
        Path('config.yaml').write_text(FILES['mace_train.yaml'])
    ctx._run.peers.all_reduce_max((0,))()
    command = example('mace_command')
    command.run_script(ctx, '--config', 'config.yaml', '--work_dir', where)
    assert not ctx.is_main or Path(where, 'tiny_stagetwo.model').exists()


@pytest.mark.parametrize('name', sorted(ROWS))
def test_same_bits(name: str, fork_server: ForkClient, tmp_path: Path) -> None:
    same_bits(*ROWS[name], fork_server, tmp_path)
