"""Models whose parameters are divided among ranks train what one process trains."""

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Subset, TensorDataset

from parsl_freetrain import BadInput, FragmentContext, Shape, export_weights, load_weights
from parsl_freetrain.training.checkpoint.flatten import same
from parsl_freetrain.training.checkpoint.manifest import verify
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Saved
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.mesh import fsdp_modules
from tests.support.examples import equal
from tests.support.ranks import ended, order

SIZE, BATCH, TOTAL, WIDTH = 37, 10, 74, 6
SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}


class Block(nn.Module):
    """A layer with parameters whose lengths no number of ranks divides, but those of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 5, generator=made), torch.randn(SIZE, 3, generator=made))


PLAN = {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()}


def train(ctx: FragmentContext, **looped: Any) -> None:
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(nn.Linear(5, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3))
    model = ctx.shard(model, blocks=(Block,), plan=PLAN)
    steps(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.01), clip=0.1, **looped)
    ctx.state['end'] = ctx.samples


def steps(
    ctx: FragmentContext,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None = None,
    stop: bool = False,
    micro_batch: int | None = None,
) -> None:
    scaler = torch.amp.GradScaler('cpu', growth_interval=3)
    model, optimizer, scaler = ctx.prepare(model, optimizer, scaler, clip_grad_norm=clip)
    for x, y in ctx.loop(data(), BATCH, micro_batch=micro_batch):
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        infinite = ctx.rank == 0 and ctx.samples == 3 * BATCH  # then no rank steps
        loss = nn.functional.mse_loss(model(x), y) * (float('inf') if infinite else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def run(
    fork_server: ForkClient,
    folder: Path,
    shape: Shape,
    fragment: int = 1,
    function: Any = train,
    mode: str = 'reproducible',
    total_samples: int = TOTAL,
    stated: bool = True,
    **options: Any,
) -> Saved:
    """``stated``: whether the trainer has shapes."""
    shaped = {'shape': shape, 'shapes': {**SHAPES, shape.ranks: shape}} if stated else {}
    ordered = order(folder, fragment, total_samples=total_samples, mode=mode, **shaped)
    outcomes = ended(fork_server, ordered, shape.ranks, folder, function, **options)
    assert {outcome.how for outcome in outcomes} <= {'stopped', 'finished'}, outcomes
    assert {outcome.samples for outcome in outcomes} == {outcomes[0].samples}
    return read_state(outcomes[0].path)


def tensors(saved: Saved) -> dict[str, torch.Tensor]:
    state = saved.optimizers[0]['state']
    return {
        **saved.models[0],
        **{f'{name}.{key}': value for name, kept in state.items() for key, value in kept.items()},
    }


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What one process makes of it without an interruption."""
    return run(fork_server, tmp_path_factory.mktemp('one'), Shape())


def one_and_more(
    fork_server: ForkClient, folder: Path, count: int, **how: Any
) -> tuple[Saved, Saved]:
    """What one rank trains and what so many train: the same bits."""
    one = run(fork_server, folder / 'one', Shape(), **how)
    more = run(fork_server, folder / 'more', Shape(shard=count), **how)
    assert equal(one.models[0], more.models[0])
    return one, more


TWICE = Shape(data=2, shard=2)


@pytest.mark.parametrize(
    ('mode', 'shapes'),
    [
        ('reproducible', (Shape(shard=4), Shape(), Shape(shard=2))),
        ('throughput', (Shape(shard=2, tensor=2), Shape())),
        pytest.param(
            'reproducible', (TWICE, Shape(shard=2), Shape(data=2)), marks=pytest.mark.long
        ),
        pytest.param(
            'throughput', (TWICE, Shape(tensor=2), Shape(shard=2)), marks=pytest.mark.long
        ),
    ],
)
def test_any_shapes_in_turn_train_what_one_process_trains(
    fork_server: ForkClient, tmp_path: Path, undisturbed: Saved, mode: str, shapes: Any
) -> None:
    """An epoch's last batch is no multiple of the ranks; every sample counts the same. In
    reproducible mode the bits are the same.
    """
    for number, shape in enumerate(shapes, 1):
        last = number == len(shapes)
        micro_batch = 2 if mode == 'throughput' and number % 2 else None
        how: dict[str, Any] = {'stop': not last, 'mode': mode, 'micro_batch': micro_batch}
        state = run(fork_server, tmp_path, shape, number, **how)
        assert (state.position.samples == TOTAL) == last
    assert state.position.user == {'end': TOTAL}
    found, expected = tensors(state), tensors(undisturbed)
    assert found.keys() == expected.keys()
    assert mode == 'throughput' or equal(found, expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def saved_without_exchange(ctx: FragmentContext) -> None:
    """Tensors are exchanged by the main thread only, not for saving, block by block."""
    collecting, collected = False, ctx._run.checkpointer._collected

    def only_for_training(plain: Any) -> Any:
        def exchange(*args: Any, **options: Any) -> Any:
            assert not collecting, plain
            assert threading.current_thread() is threading.main_thread(), plain
            return plain(*args, **options)

        return exchange

    def collect(*args: Any) -> Any:
        nonlocal collecting
        collecting = True
        try:
            return collected(*args)
        finally:
            collecting = False

    for module, names in (
        (dist, ('all_gather', 'all_reduce', 'all_to_all_single', 'broadcast', 'barrier', 'gather')),
        (dist, ('scatter', 'send', 'recv', 'all_gather_into_tensor', 'reduce_scatter_tensor')),
        (dist, ('all_gather_single', 'reduce_scatter_single')),  # their names from torch 2.13 on
        (DTensor, ('full_tensor', 'redistribute')),
    ):
        for name in filter(partial(hasattr, module), names):
            setattr(module, name, only_for_training(getattr(module, name)))
    vars(ctx._run.checkpointer)['_collected'] = collect
    train(ctx)
    assert ctx._run.model is not None
    gathered = [
        [len(group.fsdp_params) for group in module._get_fsdp_state()._fsdp_param_groups]
        for module in fsdp_modules(ctx._run.model.prepared.models)
    ]
    assert gathered == [[4], [6], [6]]  # the whole model's own, and each block's


def test_every_rank_writes_its_part_alone(fork_server: ForkClient, tmp_path: Path) -> None:
    run(fork_server, tmp_path, Shape(data=2, shard=2), function=saved_without_exchange)
    folder = max((tmp_path / 'store').glob('ckpt-*'))
    sizes = [(folder / f'rank-{rank}.safetensors').stat().st_size for rank in range(4)]
    assert max(sizes) < 2 * min(sizes)
    listed = {file.name for file in verify(folder).files}
    assert listed >= {f'rank-{rank}.json' for rank in range(1, 4)}


def sharded_by_hand(ctx: FragmentContext) -> None:
    """A model that its user has sharded over the mesh, made on the CPU."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 3))
    fully_shard(model[1], mesh=ctx.mesh['shard'])
    fully_shard(model, mesh=ctx.mesh['shard'])
    steps(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_sharded_by_hand_has_the_same_bits(fork_server: ForkClient, tmp_path: Path) -> None:
    one_and_more(fork_server, tmp_path, 2, function=sharded_by_hand)


def sharded_or_whole(ctx: FragmentContext) -> None:
    """A model that is sharded where the trainer has shapes."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 3))
    model = ctx.shard(model, blocks=(Block,)) if ctx._run.order.spec.shapes else model
    steps(ctx, model, torch.optim.AdamW(model.parameters()))


def test_a_whole_model_goes_on_sharded_and_back(fork_server: ForkClient, tmp_path: Path) -> None:
    """Its optimizer's state is by number there, and by name here."""
    shape, function = Shape(shard=2), sharded_or_whole
    for number, stated in enumerate((False, True, False), 1):
        how: Any = {'function': function, 'total_samples': 10 * number, 'stated': stated}
        found = run(fork_server, tmp_path / 'both', shape, number, **how)
    one = run(fork_server, tmp_path / 'one', Shape(), **how)
    assert equal(found.models[0], one.models[0]) and found.position.samples == 30


class Language(nn.Module):
    """Words of the last layer are those of the first, and both know which are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = Words(), Block(), Words()
        self.head.weight, self.head.rare = self.words.weight, self.words.rare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(self.words(x)), self.head.weight) * self.head.rare


class Words(nn.Embedding):
    rare: torch.Tensor

    def __init__(self) -> None:
        super().__init__(11, WIDTH)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.register_buffer('rare', torch.rand(self.num_embeddings))


def speak(ctx: FragmentContext, stop: bool = False) -> None:
    with torch.device('meta'):
        whole, other = Language(), Language()
    with pytest.raises(BadInput, match="'words.weight' and 'head.weight' are one tensor, and bloc"):
        ctx.shard(other, blocks=(Block, Words))
    model: Any = ctx.shard(whole, blocks=(Block,))
    assert model.head.weight is model.words.weight
    assert model.head.rare is model.words.rare
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    texts = torch.randint(11, (SIZE, 2), generator=torch.Generator().manual_seed(1))
    for x, y in ctx.loop(TensorDataset(*texts.T), BATCH):
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_tied_tensors_of_the_meta_device_stay_tied(fork_server: ForkClient, tmp_path: Path) -> None:
    one = run(fork_server, tmp_path / 'one', Shape(), function=speak)
    run(fork_server, tmp_path / 'two', Shape(shard=2), function=speak, stop=True)
    two = run(fork_server, tmp_path / 'two', Shape(shard=2), 2, function=speak)
    assert two.position.samples == TOTAL
    assert equal(tensors(one), tensors(two))
    weights = load_weights(two.path)
    file = export_weights(two.path, tmp_path / 'language.safetensors')
    assert same(load_file(file), weights)
    torch.manual_seed(9)
    whole = Language()
    first = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    whole.load_state_dict(weights)
    assert torch.equal(weights['head.weight'], weights['words.weight'])
    assert torch.equal(whole.words.rare, weights['head.rare'])
    assert not torch.equal(whole.words.weight, first['words.weight'])


def in_bfloat16(ctx: FragmentContext) -> None:
    """Computes in bfloat16; sums and parameters are in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 3))
    model = ctx.shard(model, blocks=(Block,), precision=policy)
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for x, y in ctx.loop(data(), BATCH):
        optimizer.zero_grad()
        found = model(x)
        assert found.dtype == torch.bfloat16
        nn.functional.mse_loss(found.float(), y).backward()
        optimizer.step()


def test_mixed_precision_has_the_same_bits(fork_server: ForkClient, tmp_path: Path) -> None:
    one, _ = one_and_more(fork_server, tmp_path, 2, function=in_bfloat16)
    assert all(tensor.dtype == torch.float32 for tensor in one.models[0].values())


def on_a_plateau(ctx: FragmentContext) -> None:
    """Last batches with fewer samples than shards, and a scheduler that takes the loss."""
    torch.manual_seed(3)
    model = ctx.shard(nn.Sequential(nn.Linear(5, WIDTH), Block(), nn.Linear(WIDTH, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    for x, y in ctx.loop(Subset(data(), range(33)), BATCH):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss)


def test_empty_shards_and_schedulers_by_loss(fork_server: ForkClient, tmp_path: Path) -> None:
    one, four = one_and_more(fork_server, tmp_path, 4, function=on_a_plateau, total_samples=66)
    assert four.schedulers == one.schedulers
    assert one.optimizers[0]['param_groups'][0]['lr'] < 0.1
