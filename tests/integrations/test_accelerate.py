"""The environment of torchrun, with accelerate and with several ranks, and Lightning's Fabric."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# As default arguments it keeps the group that there is when it is imported, with its open port.
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import BadInput, FragmentContext, Reproducible, Throughput
from parsl_freetrain.integrations.accelerate import torchrun_environment
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal, in_this_process
from tests.support.ranks import all_finish, order

DATA = TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)
NAMES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.setenv(name, '')
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def steps(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for (x,) in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def asks_accelerate(ctx: FragmentContext) -> Any:
    accelerate = pytest.importorskip('accelerate', reason='needs the extra accelerate')
    torchrun_environment(ctx)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ctx.world_size > 1:
        with pytest.raises(BadInput, match='wrapped in DistributedDataParallel already'):
            ctx.prepare(DistributedDataParallel(model), optimizer)
    with pytest.raises(BadInput, match='an AcceleratedOptimizer of accelerate: leave out'):
        ctx.prepare(model, accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)))
    steps(ctx, *ctx.prepare(model, optimizer))
    own = torch.tensor([accelerator.process_index + 1.0])
    gathered = accelerator.gather(own).sum().item()
    return [accelerator.num_processes, accelerator.is_main_process == ctx.is_main, gathered]


def test_accelerate_finds_one_rank(own_environment: None) -> None:
    checkpoint, _ = in_this_process(asks_accelerate, total_epochs=1)
    assert checkpoint.result == [1, True, 1.0]
    assert os.environ['RANK'] == os.environ['LOCAL_RANK'] == '0'


def test_accelerate_finds_ranks_its_wrappers_are_refused(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    outcomes = all_finish(
        fork_server, order(tmp_path, total_samples=8), 2, tmp_path, asks_accelerate
    )
    assert outcomes[0].result == '[2, true, 3.0]'


def with_fabric(ctx: FragmentContext) -> None:
    pytest.importorskip('lightning', reason='needs the extra lightning')
    from parsl_freetrain.integrations.lightning_fabric import Fabric

    def train(fabric: Any) -> None:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = fabric.setup(model, optimizer, clip_grad_norm=0.5)
        for (x,) in fabric.loop(DataLoader(DATA, batch_size=2, shuffle=True), accumulate=2):
            optimizer.zero_grad()
            with fabric.autocast():
                loss = model(x).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            fabric.log_dict({'loss': loss})
        with pytest.raises(BadInput, match='fabric.save is not supported .*: the app writes'):
            fabric.save('there', {})
        with pytest.raises(BadInput, match=r'the gradients of n batches say fabric\.loop'):
            fabric.no_backward_sync(model)

    with pytest.raises(BadInput, match=r"Fabric\(precison='bf16-mixed'\) .*: say precision\."):
        Fabric(ctx, precison='bf16-mixed')
    Fabric(ctx, accelerator='auto').launch(train)


def without_fabric(ctx: FragmentContext) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps(ctx, *ctx.prepare(model, optimizer, clip_grad_norm=0.5))


def accumulates_by_hand(ctx: FragmentContext) -> None:
    from parsl_freetrain.integrations.lightning_fabric import Fabric

    fabric, model = Fabric(ctx), nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x,) in enumerate(fabric.loop(DataLoader(DATA, batch_size=4)), 1):
        fabric.backward(model(x).pow(2).mean() / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize('mode', [Reproducible(shards=2), Throughput()])
def test_fabric_does_not_accumulate_by_hand(mode: Any) -> None:
    pytest.importorskip('lightning', reason='needs the extra lightning')
    with pytest.raises(BadInput, match=r'to accumulate the gradients of n batches say ctx\.loop'):
        in_this_process(accumulates_by_hand, total_epochs=2, mode=mode)


def test_fabric_trains_as_the_plain_loop() -> None:
    checkpoint, weights = in_this_process(with_fabric, total_epochs=2)
    _, plain = in_this_process(without_fabric, total_epochs=2)
    assert equal(weights, plain) and 'loss' in checkpoint.metrics
