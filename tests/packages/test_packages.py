"""Training with the packages of scientists: one rank undisturbed, and two ranks that are stopped
and go on as one, give the same bits. Each test is a row of docs/packages.md.
"""

from __future__ import annotations

# mypy: ignore-errors
# The packages are not installed where types are checked.
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, export_weights, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal
from tests.support.ranks import order, ranks
from tests.training.checkpoint.test_checkpoint_export import saved

Rows = dict[str, tuple[str, Callable[..., None]]]
ROWS: Rows = {}


def row(needs: str, rows: Rows = ROWS) -> Callable[[Any], Any]:
    def take(function: Any) -> Any:
        rows[function.__name__] = needs, function
        return function

    return take


def numbers(size: int = 48, columns: int = 8) -> TensorDataset:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(size, columns, generator=made)
    return TensorDataset(x, x.sum(1, keepdim=True))


def texts(size: int = 48) -> list[Any]:
    made = torch.randint(5, 64, (size, 12), generator=torch.Generator().manual_seed(0))
    return [{'input_ids': text, 'labels': text} for text in made]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    how = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    return GPT2LMHeadModel(how)


def train(
    ctx: FragmentContext,
    model: nn.Module,
    data: Any,
    loss_of: Callable[[Any, Any], torch.Tensor],
    optimizer: Any = None,
    batch_size: int | None = 8,
) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-2)
    model, optimizer = ctx.prepare(model, optimizer)
    for batch in ctx.loop(data, batch_size):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        ctx.report(loss=0.0)


def squared(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@row('peft')
def peft_lora(ctx: FragmentContext) -> None:
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=4, target_modules=['c_attn'], fan_in_fan_out=True, lora_dropout=0.1)
    model = get_peft_model(gpt(), how)
    train(ctx, model, texts(), lambda m, b: m(**b).loss)


def with_adam(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, torch.optim.Adam(model.parameters(), 1e-2)


@row('monai')
def monai_unet(ctx: FragmentContext) -> None:
    import monai
    from monai.transforms import Compose, EnsureTyped, RandFlipd, RandGaussianNoised

    made = torch.Generator().manual_seed(0)
    items = [{'image': torch.randn(1, 8, 8, 8, generator=made)} for _ in range(48)]
    keys = ['image', 'label']
    for one in items:
        one['label'] = (one['image'] > 0.3).float()
    noise = RandGaussianNoised(['image'], prob=0.5)
    flips = RandFlipd(keys, prob=0.5, spatial_axis=0)
    augment = Compose([EnsureTyped(keys), flips, noise])
    dataset = monai.data.CacheDataset(items, augment, progress=False)
    model = monai.networks.nets.UNet(3, 1, 1, channels=(4, 8), strides=(2,), num_res_units=1)
    loss_of = monai.losses.DiceCELoss(sigmoid=True)
    loader = monai.data.DataLoader(dataset, batch_size=8, shuffle=True)
    train(ctx, model, loader, lambda m, b: loss_of(m(b['image']), b['label']), batch_size=None)


@row('neuralop')
def neuraloperator_fno(ctx: FragmentContext) -> None:
    from neuralop.models import FNO

    x = torch.randn(48, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model = FNO(n_modes=(8, 8), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2)
    train(ctx, model, TensorDataset(x, x.roll(1, -1) * 0.5), squared)


@row('gpytorch')
def gpytorch_svgp(ctx: FragmentContext) -> None:
    import gpytorch

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self, inducing: torch.Tensor) -> None:
            how = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, how))
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    data = numbers()
    both = nn.ModuleList([Model(data.tensors[0][:8]), gpytorch.likelihoods.GaussianLikelihood()])
    ctx.warm_up(lambda: both[0](data.tensors[0][:8]))  # it initialises itself in its first pass
    objective = gpytorch.mlls.VariationalELBO(both[1], both[0], num_data=48)

    def loss(models: Any, batch: Any) -> torch.Tensor:
        return -objective(models[0](batch[0]), batch[1][:, 0])

    train(ctx, both, data, loss)


@row('torch_geometric')
def torch_geometric_gcn(ctx: FragmentContext) -> None:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    made = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(48):
        n = int(torch.randint(3, 7, (1,), generator=made))
        edges = torch.randint(0, n, (2, 3 * n), generator=made)
        x = torch.randn(n, 4, generator=made)
        graphs.append(Data(x=x, edge_index=edges, y=x.sum()[None]))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = GCNConv(4, 8), nn.Linear(8, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            x = self.conv(batch.x, batch.edge_index).relu()
            return self.out(global_mean_pool(x, batch.batch, size=batch.num_graphs))[:, 0]

    loader = DataLoader(graphs, batch_size=8, shuffle=True)
    train(ctx, Net(), loader, lambda m, b: F.mse_loss(m(b), b.y), batch_size=None)


@row('torchdiffeq')
def torchdiffeq_ode(ctx: FragmentContext) -> None:
    from torchdiffeq import odeint

    field = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    times = torch.tensor([0.0, 1.0])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        end = odeint(lambda t, y: model(y), batch[0], times, method='rk4')[-1]
        return F.mse_loss(end.sum(1, keepdim=True), batch[1])

    train(ctx, field, numbers(), loss)


@row('pytorch_optimizer')
def pytorch_optimizer_lookahead(ctx: FragmentContext) -> None:
    from pytorch_optimizer import Lookahead

    model = small()
    train(ctx, model, numbers(), squared, Lookahead(torch.optim.AdamW(model.parameters())))


@row('schedulefree')
def schedulefree_adamw(ctx: FragmentContext) -> None:
    from schedulefree import AdamWScheduleFree

    model = small()
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
    optimizer.train()
    train(ctx, model, numbers(), squared, optimizer)


@row('torchao')
def torchao_adam_8bit(ctx: FragmentContext) -> None:
    from torchao.optim import AdamW8bit

    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 1))
    train(ctx, model, numbers(), squared, AdamW8bit(model.parameters(), lr=1e-2))


@row('skorch')
def skorch_steps(ctx: FragmentContext) -> None:
    from skorch import NeuralNetRegressor

    net = NeuralNetRegressor(small(), optimizer=torch.optim.Adam, lr=1e-2).initialize()
    net.module_, net.optimizer_ = ctx.prepare(net.module_, net.optimizer_)
    for batch in ctx.loop(numbers(), 8):
        net.optimizer_.zero_grad()
        net.train_step_single(batch)
        net.optimizer_.step()


@row('snntorch')
def snntorch_leaky(ctx: FragmentContext) -> None:
    from snntorch import Leaky, surrogate, utils

    how = {'beta': 0.9, 'init_hidden': True, 'spike_grad': surrogate.fast_sigmoid()}
    model = nn.Sequential(
        nn.Linear(8, 16), Leaky(**how), nn.Linear(16, 2), Leaky(**how, output=True)
    )

    def loss(model: Any, batch: Any) -> torch.Tensor:
        utils.reset(model)
        wanted = (batch[1][:, 0] > 0).long()
        return sum(F.cross_entropy(model(batch[0])[1], wanted) for _ in range(4))

    train(ctx, model, numbers(), loss)


def _module(package: Any) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = small(), list[torch.Tensor]()

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = squared(self.net, batch)
            self.log('train_loss', loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.losses.append(squared(self.net, batch))

        def on_validation_epoch_end(self) -> None:
            self.log('val_loss', torch.stack(self.losses).mean())
            self.losses.clear()

        def on_train_epoch_end(self) -> None:
            found = self.trainer.callback_metrics
            with torch.no_grad():
                self.net[0].bias += found['val_loss'] + found['train_loss']

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return Module()


def _fit(ctx: FragmentContext, package: Any) -> None:
    from parsl_freetrain.integrations.lightning import Trainer

    class Average(package.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.kept = {k: v.clone() for k, v in module.state_dict().items()}

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for name, value in module.state_dict().items():
                self.kept[name].lerp_(value, 0.1)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(self.kept)

    loaders = (torch.utils.data.DataLoader(numbers(n), 8, shuffle=n > 20) for n in (48, 20))
    Trainer(ctx, max_epochs=2, callbacks=[Average()]).fit(_module(package), *loaders)


@row('lightning')
def lightning_module(ctx: FragmentContext) -> None:
    import lightning.pytorch

    _fit(ctx, lightning.pytorch)


@row('pytorch_lightning')
def pytorch_lightning_module(ctx: FragmentContext) -> None:
    import pytorch_lightning

    _fit(ctx, pytorch_lightning)


@row('lightning')
def lightning_fabric(ctx: FragmentContext) -> None:
    from parsl_freetrain.integrations.lightning_fabric import Fabric

    fabric = Fabric(ctx, accelerator='auto')
    fabric.launch()
    fabric.seed_everything(1)
    model, optimizer = fabric.setup(*with_adam(small()))
    for batch in fabric.loop(torch.utils.data.DataLoader(numbers(), 8, shuffle=True)):
        optimizer.zero_grad()
        with fabric.autocast():
            loss = squared(model, batch)
        fabric.backward(loss)
        optimizer.step()
        fabric.log('loss', loss)


def run(ctx: FragmentContext, train: Any, where: str, stop_at: int | None = None) -> None:
    os.chdir(where)  # some packages write into the current folder
    torch.manual_seed(0)
    if stop_at is not None:
        stop = lambda: os.kill(os.getpid(), signal.SIGTERM) if ctx.samples >= stop_at else 0  # noqa: E731
        ctx.after_step(stop)
    train(ctx)


@pytest.mark.parametrize('name', sorted(ROWS))
def test_same_bits(name: str, fork_server: ForkClient, tmp_path: Path) -> None:
    same_bits(*ROWS[name], fork_server, tmp_path)


def same_bits(needs: str, function: Any, fork_server: ForkClient, tmp_path: Path) -> None:
    if find_spec(needs) is None:
        pytest.skip(f'needs {needs}')
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])

    def ended(
        folder: str, fragment: int, count: int, mode: str = 'reproducible', **options: Any
    ) -> Any:
        ordered = order(tmp_path / folder, fragment, total_epochs=2, total_samples=None, mode=mode)
        with ranks(
            fork_server, ordered, count, tmp_path, run, function, str(tmp_path), **options
        ) as gang:
            return gang.run()[0]

    whole = ended('whole', 1, 1)
    assert whole.how == 'finished', whole.error
    stopped = ended('cut', 1, 2, stop_at=16)
    assert stopped.how == 'stopped', stopped.error
    cut = ended('cut', 2, 1)
    assert cut.how == 'finished', cut.error
    assert equal(
        *(
            {key: value for key, value in load_weights(one.path).items() if torch.is_tensor(value)}
            for one in (whole, cut)
        )
    )
    fast = ended('fast', 1, 2, 'throughput')
    assert fast.how == ('error' if function.__name__ == 'mace_run_train' else 'finished'), (
        fast.error
    )


def test_each_row_of_the_page_is_a_test() -> None:
    from tests.packages import test_trainers

    page = (Path(__file__).parents[2] / 'docs/packages.md').read_text()
    rows = re.findall(r'^\| [^|]+ \| [\d.]+ \| ([^|]+) \|', page, re.MULTILINE)
    assert len(rows) >= 25
    named = {name for row in rows for name in re.findall(r'`(\w+)`', row)}
    assert named == ROWS.keys() | test_trainers.ROWS.keys()


def test_adapters_in_the_format_of_peft(tmp_path: Path) -> None:
    pytest.importorskip('peft')
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file

    base = gpt()
    given = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    how = LoraConfig(r=4, target_modules=['c_attn'], fan_in_fan_out=True, modules_to_save=['wpe'])
    model = get_peft_model(base, how)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    folder = export_weights(saved(tmp_path / 'x', model), tmp_path / 'own', adapter_only=True)
    model.save_pretrained(tmp_path / 'theirs')
    name = 'adapter_model.safetensors'
    assert equal(load_file(folder / name), load_file(tmp_path / 'theirs' / name))
    fresh = gpt()
    fresh.load_state_dict(given)
    loaded, batch = PeftModel.from_pretrained(fresh, folder), texts()[0]['input_ids'][None]
    assert torch.equal(loaded(batch).logits, model.eval()(batch).logits)
