"""What cannot be sharded, or not with the promised bits, gets a sentence."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parsl_freetrain import BadInput, FragmentContext, Reproducible, Scaled, Shape, Throughput
from parsl_freetrain.training.checkpoint.state import check_shapes
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.parallel.sharded import shard_model
from parsl_freetrain.training.parallel.sharded.shard import fill
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.shapes import check_shape
from parsl_freetrain.training.steps.sharded import check_sharded
from tests.support.ranks import ended, order

CPU = torch.device('cpu')
ONE: Any = SimpleNamespace(shape=Shape(), parts=1)


def test_a_shape_that_the_mode_does_not_support() -> None:
    for shape, mode, words in (
        (Shape(shard=2, pipeline=2), Throughput(), 'and also space or stages; say either'),
        (Shape(shard=2), Scaled(combine='adasum'), "say combine='mean'"),
        (Shape(shard=3), Reproducible(shards=6), 'shard must be a power of two'),
        (Shape(data=3, shard=2), Reproducible(shards=4), 'must divide the 4 virtual shards'),
    ):
        with pytest.raises(BadInput, match=words):
            check_shape(shape, mode, 'here')
        check_shape(Shape(data=3, shard=2), Reproducible(shards=12), 'here')
        check_shape(Shape(shard=3, tensor=2), Throughput(), 'here')


class Unset(nn.Module):
    """Keeps something that only its constructor can make."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('places', torch.arange(3.0), persistent=False)

    def reset_parameters(self) -> None:
        pass


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].weight = model[0].weight  # type: ignore[index]
    return model


def half_on_meta() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device='meta'))


def test_a_model_that_cannot_be_divided() -> None:
    two, three = {'tensors': (1, 2)}, "'0.weight' has 3 elements, which 2 tensor parallel ranks"
    for model, options, words in (
        (nn.Linear(2, 2), {'blocks': nn.Linear}, r'as blocks=\(Block,\)'),
        (nn.Linear(2, 2), {'blocks': (nn.Conv1d,)}, 'blocks=Conv1d, and the model has no module'),
        (nn.Sequential(nn.Linear(2, 2)), {'plan': {'*.up': None}}, 'no module of the model has th'),
        # Also if it begins with a shape that does not divide it.
        (
            nn.Sequential(nn.Linear(4, 3)),
            {'plan': {'*': ColwiseParallel()}, **two},
            f'0 of {three}',
        ),
        (
            nn.Sequential(nn.Linear(3, 4)),
            {'plan': {'0': RowwiseParallel()}, **two},
            f'1 of {three}',
        ),
        (nn.Sequential(nn.Embedding(4, 3)), {'plan': {'0': ColwiseParallel()}, **two}, three),
        (
            tied(),
            {'plan': {'0': ColwiseParallel()}, **two},
            "'0.weight' and '1.0.weight' are one t",
        ),
        (half_on_meta(), {}, "'1.weight' is on the meta device and '0.weight' is not"),
    ):
        mesh: Any = None
        with pytest.raises(BadInput, match=words):
            shard_model(model, mesh, CPU, 0, **options)


def test_a_module_without_first_values() -> None:
    with pytest.raises(BadInput, match=r"Bare '0' its first values: it has no reset_parameters"):
        fill(nn.Sequential(Bare()), CPU, 0, None, saved=False)
    with pytest.raises(BadInput, match=r"leaves 'places' of Unset '0' without a value"):
        fill(nn.Sequential(Unset()), CPU, 0, None, saved=True)
    bare = Bare()
    fill(bare, CPU, 0, lambda module: nn.init.ones_(module.weight), saved=False)  # type: ignore[arg-type]
    assert torch.equal(bare.weight, torch.ones(2))


def things(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Prepared:
    return sort_out((model, optimizer or torch.optim.AdamW(model.parameters())), named=True)


def test_what_has_no_optimizer_or_too_few_bits() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    some = things(model, torch.optim.AdamW(model[0].parameters()))
    with pytest.raises(BadInput, match="'1.weight' of model 1 of ctx.prepare is in no optimizer"):
        check_sharded(some, ONE, Throughput())
    model[1].requires_grad_(False)
    check_sharded(some, ONE, Throughput())
    half = things(nn.Linear(2, 2).bfloat16())
    with pytest.raises(BadInput, match=r'torch.bfloat16, in which a reproducible sum'):
        check_sharded(half, ONE, Reproducible(shards=2))
    check_sharded(half, ONE, Throughput())


def test_a_checkpoint_of_another_model_says_what_was_and_what_is() -> None:
    said = r'of another model than model 1 .*\(w has shape \(3,\) there and \(2,\) here\)'
    with pytest.raises(BadInput, match=said):
        check_shapes({'w': (2,)}, {'w': (3,)}, 0, 'c')


class Lamb(torch.optim.SGD):
    """Derived from an elementwise one, as LAMB may be, whose step takes norms of whole tensors."""


@pytest.mark.parametrize('kind', [torch.optim.Adafactor, torch.optim.Muon, Lamb])
def test_an_optimizer_that_is_not_elementwise_is_for_throughput_mode(kind: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = things(model, kind(model.parameters()))
    said = rf'given {kind.__name__}, which is not known.*mode=Throughput\(\)'
    with pytest.raises(BadInput, match=said):
        check_sharded(optimizer, ONE, Reproducible(shards=2))
    check_sharded(optimizer, ONE, Throughput())


def another_mesh(ctx: FragmentContext) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=DeviceMesh.from_group(ctx.torch_distributed(), 'cpu'))
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def partly(ctx: FragmentContext) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=ctx.mesh['shard'])
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def buffers(ctx: FragmentContext) -> None:
    model = ctx.shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in ctx.loop(list(torch.ones(8, 4)), 8):
        model(x).sum().backward()
        optimizer.step()


def clips(ctx: FragmentContext) -> None:
    model = ctx.shard(nn.Linear(4, 4))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in ctx.loop(list(torch.ones(8, 4)), 8):
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def with_an_old_torch(ctx: FragmentContext) -> None:
    torch.__version__ = type(torch.__version__)('2.9.1')
    ctx.shard(nn.Linear(2, 2))


def twice(ctx: FragmentContext) -> None:
    ctx.shard(ctx.shard(nn.Linear(4, 4)))


def uneven(ctx: FragmentContext) -> None:
    ctx.shard(nn.Sequential(nn.Linear(4, 3)), plan={'0': ColwiseParallel()})


def without_plan(ctx: FragmentContext) -> None:
    ctx.shard(nn.Linear(4, 4))


def low_sums(ctx: FragmentContext) -> None:
    model = ctx.shard(nn.Linear(4, 4), precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


REFUSED = {
    with_an_old_torch: 'ctx.shard needs torch 2.10 or newer, and this is 2.9.1',
    twice: 'ctx.shard was given a model that is sharded already',
    uneven: "dimension 0 of '0.weight' has 3 elements, which 2 tensor parallel ranks",
    without_plan: 'given no plan, and the trainer has shapes with tensor=2, whose ranks would',
    low_sums: 'whose gradients are added up in torch.bfloat16, in which a reproducible sum',
    another_mesh: "'weight' of model 1 of ctx.prepare is sharded over another mesh",
    partly: "'1.weight' of model 1 of ctx.prepare is not sharded (the shape is data 1 x shard 2)",
    clips: 'A gradient was changed between backward() and optimizer.step()',
    buffers: 'has changed in a forward pass, as in batch normalisation',
}


@pytest.mark.parametrize('function', REFUSED)
def test_a_model_sharded_otherwise(fork_server: ForkClient, tmp_path: Path, function: Any) -> None:
    shape = Shape(tensor=2) if function in (uneven, without_plan) else Shape(shard=2)
    ordered = order(tmp_path, total_samples=8, shape=shape, shapes={2: shape})
    outcomes = ended(fork_server, ordered, 2, tmp_path, function)
    errors = [outcome.error.message for outcome in outcomes if outcome.how == 'error']
    assert errors and REFUSED[function] in errors[0]
