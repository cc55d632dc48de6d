"""What was saved by any number of ranks is loaded by any other number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parsl_freetrain.training.checkpoint.dcp import load, load_all, save
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import WarmParent
from tests.support.ranks import finish, order, ranks

SAVERS = 4


def whole() -> dict[str, torch.Tensor]:
    """What each rank can work out; lengths that no number of ranks divides."""
    made = torch.Generator().manual_seed(1)
    return {
        'rows': torch.randn(13, 5, generator=made),
        'columns': torch.randn(3, 11, generator=made),
        'replicated': torch.randn(6, generator=made),
    }


def sharded(ctx: FragmentContext, *, fill: bool) -> dict[str, Any]:
    full = whole()
    mesh = init_device_mesh('cpu', (ctx.world_size,))
    if not fill:
        full = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    return {
        'rows': distribute_tensor(full['rows'], mesh, [Shard(0)]),
        'columns': distribute_tensor(full['columns'], mesh, [Shard(1)]),
        'replicated': full['replicated'].clone(),
    }


def fsdp_state(ctx: FragmentContext, steps: int) -> dict[str, Any]:
    """Parameters and momenta of a model in FSDP2 shards, after some steps that do not depend on the
    number of ranks.
    """
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh('cpu', (ctx.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(2, 5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    names = dict(model.named_parameters())
    state: dict[str, Any] = {f'model.{name}': parameter.data for name, parameter in names.items()}
    for name, parameter in names.items():
        state[f'optimizer.{name}'] = (
            optimizer.state[parameter]['momentum_buffer']
            if steps
            else torch.zeros_like(parameter.data)
        )
    return state


def save_sharded(ctx: FragmentContext, folder: Path) -> None:
    state = {**sharded(ctx, fill=True), **fsdp_state(ctx, 3), 'position': {'samples': 30}}
    store = PosixCheckpointStore(folder, 'sharded')

    def write(path: Path) -> None:
        dist.broadcast_object_list([str(path)], src=0)
        save(path, state, group=dist.group.WORLD)

    if ctx.is_main:
        store.save(write, samples=30, fragment=1, metrics={})
    else:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        save(Path(told[0]), state, group=dist.group.WORLD)
    finish(ctx)


def load_sharded(ctx: FragmentContext, path: Path) -> None:
    state: dict[str, Any] = {**sharded(ctx, fill=False), **fsdp_state(ctx, 0), 'position': None}
    load(path, state, group=dist.group.WORLD)
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    assert full.pop('position') == {'samples': 30}
    expected = load_all(path)
    assert expected.pop('position') == {'samples': 30}
    assert full.keys() == expected.keys()
    wrong = [name for name in full if not torch.equal(full[name], expected[name])]
    assert not wrong, wrong
    finish(ctx)


@pytest.fixture(scope='module')
def checkpoint(warm: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('sharded')
    with ranks(
        warm, order(folder, total_samples=4), SAVERS, folder, save_sharded, folder / 'sharded'
    ) as gang:
        outcomes = gang.run()
    assert [outcome.how for outcome in outcomes] == ['finished'] * SAVERS, outcomes
    found = PosixCheckpointStore(folder / 'sharded', 'sharded').latest()
    assert found is not None
    return Path(found.path)


def test_every_rank_writes_its_part_and_nobody_writes_twice(checkpoint: Path) -> None:
    names = {path.name for path in checkpoint.iterdir()}
    assert {f'rank-{rank}.safetensors' for rank in range(SAVERS)} <= names
    table = json.loads((checkpoint / 'tensors.json').read_text())['tensors']
    assert len(table['rows']['chunks']) == SAVERS
    assert len(table['replicated']['chunks']) == 1
    data = sum(path.stat().st_size for path in checkpoint.glob('*.safetensors'))
    assert (
        data
        < 2
        * sum(
            tensor.nbytes
            for tensor in load_all(checkpoint).values()
            if isinstance(tensor, torch.Tensor)
        )
        + 8000
    )


def test_one_process_reads_it_all(checkpoint: Path) -> None:
    loaded = load_all(checkpoint)
    for name, tensor in whole().items():
        assert torch.equal(loaded[name], tensor)
    assert loaded['model.0.weight'].shape == (7, 5)
    assert any(
        tensor.abs().max() > 0 for name, tensor in loaded.items() if name.startswith('optimizer.')
    )


@pytest.mark.parametrize('world_size', [2, 3, 5])
def test_other_numbers_of_ranks_read_their_shards(
    warm: WarmParent, checkpoint: Path, tmp_path: Path, world_size: int
) -> None:
    with ranks(
        warm,
        order(tmp_path, total_samples=4, shards=5),
        world_size,
        tmp_path,
        load_sharded,
        checkpoint,
    ) as gang:
        outcomes = gang.run()
    assert [outcome.how for outcome in outcomes] == ['finished'] * world_size, outcomes
