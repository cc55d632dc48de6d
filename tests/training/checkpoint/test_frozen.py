"""What no optimizer trains is written once; checkpoints have the size of what is trained."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from parsl_freetrain.training.checkpoint.frozen import fingerprints
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.damage import flip
from tests.support.ranks import ended, order

WIDTH, SIZE, BATCH, TOTAL = 200, 16, 8, 64
BASE = 4 * WIDTH * WIDTH
SHAPES = {1: ft.Shape(), 2: ft.Shape(shard=2)}


class Tuned(nn.Module):
    """A large layer that is given, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.own(self.base(x).tanh())


def train(
    ctx: ft.FragmentContext,
    change_at: int = 0,
    sharded: bool = False,
    stop: bool = False,
    seed: int = 0,
) -> None:
    torch.manual_seed(seed)
    model: nn.Module = Tuned()
    if sharded:
        model = ctx.shard(model, blocks=(nn.Linear,))
    # All parameters, as many scripts do: those without a gradient stay as they are.
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
    x = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1))

    def saved() -> None:
        if change_at and ctx.samples == change_at:
            weight = next(iter(model.parameters())).data
            weight.copy_(weight.flip(0))  # the same bits in another order, and unseen by torch
        ctx.checkpoint()

    ctx.each_epoch(saved)
    if stop:
        ctx.after_step(
            lambda: os.kill(os.getpid(), signal.SIGTERM) if ctx.samples >= 2 * SIZE else None
        )
    for (features,) in ctx.loop(TensorDataset(x), BATCH):
        optimizer.zero_grad()
        model(features).pow(2).mean().backward()
        optimizer.step()


def fragment(
    server: ForkClient, folder: Path, number: int, count: int = 1, *, keep: int = 9, **how: Any
) -> Any:
    shapes = {'shape': SHAPES[count], 'shapes': SHAPES} if how.get('sharded') else {}
    ordered = order(folder, number, total_samples=TOTAL, keep=keep, **shapes)
    return ended(server, ordered, count, folder, train, **how)[0]


def sizes(folder: Path) -> list[int]:
    """Bytes of each checkpoint's own files, oldest first."""
    every = sorted((folder / 'store').glob('ckpt-*'))
    return [sum(file.stat().st_size for file in one.iterdir()) for one in every]


def frozen(folder: Path) -> list[Path]:
    return sorted((folder / 'store' / 'frozen').iterdir())


@pytest.mark.parametrize('sharded', [False, True], ids=['whole', 'sharded'])
def test_checkpoints_are_small(fork_server: ForkClient, tmp_path: Path, sharded: bool) -> None:
    alone, cut = tmp_path / 'alone', tmp_path / 'cut'
    whole = fragment(fork_server, alone, 1, sharded=sharded)
    assert whole.how == 'finished', whole.error
    stopped = fragment(fork_server, cut, 1, 2, stop=True, sharded=sharded)
    assert stopped.how == 'stopped', stopped.error
    following = fragment(fork_server, cut, 2, sharded=sharded)
    assert following.how == 'finished', following.error
    assert ft.same_weights(whole.path, following.path)
    for folder in (alone, cut):
        own = sizes(folder)
        assert len(own) >= 4
        assert max(own) < BASE / 4, own
    assert sum(file.stat().st_size for file in frozen(alone)) < 1.1 * BASE
    # Whole again, where it is used without FreeTrain.
    file = ft.export_weights(whole.path, tmp_path / 'model.safetensors')
    assert file.stat().st_size > BASE
    assert tuple(ft.load_weights(whole.path)['base.weight'].shape) == (WIDTH, WIDTH)


def test_what_a_function_changes_itself_is_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    changed = fragment(fork_server, tmp_path, 1, change_at=32)
    first, *_, last = sorted((tmp_path / 'store').glob('ckpt-*'))
    before, after = (ft.load_weights(one)['base.weight'] for one in (first, last))
    assert torch.equal(before.flip(0), after)
    assert not torch.equal(before, after)
    assert str(last) == changed.path
    assert [size > BASE for size in sizes(tmp_path)][-3:] == [True] * 3


@pytest.mark.parametrize('how', ['bytes', 'missing'])
def test_a_damaged_file_is_written_anew_of_what_the_function_makes(
    fork_server: ForkClient, tmp_path: Path, how: str
) -> None:
    whole = fragment(fork_server, tmp_path / 'whole', 1)
    cut = tmp_path / 'cut'
    assert fragment(fork_server, cut, 1, stop=True).how == 'stopped'
    (file,) = frozen(cut)
    content, store = file.read_bytes(), PosixCheckpointStore(cut / 'store', 'digits')
    file.unlink() if how == 'missing' else flip(file)
    newest = store.latest(shared=False)
    assert newest is not None
    with pytest.raises(ft.BadInput, match=r'f000001-r0.* put the file back, or train on'):
        ft.load_weights(newest)
    count = 2 if how == 'missing' else 1
    other = fragment(fork_server, cut, 2, count, seed=1)
    assert 'What ctx.prepare was given has other values' in other.error.message
    assert store.newest() == newest  # nothing was set aside
    following = fragment(fork_server, cut, 3, count)
    assert following.how == 'finished', following.error
    assert file.read_bytes() == content
    assert ft.same_weights(whole.path, following.path)
    assert max(sizes(cut)) < BASE / 4


def test_the_file_goes_with_its_last_checkpoint(fork_server: ForkClient, tmp_path: Path) -> None:
    fragment(fork_server, tmp_path, 1, stop=True, keep=1)
    assert len(frozen(tmp_path)) == 1
    fragment(fork_server, tmp_path, 2, keep=1, change_at=64)
    assert sizes(tmp_path)[-1] > BASE
    assert frozen(tmp_path) == []


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.int8, torch.complex64])
def test_fingerprints_see_every_change_and_every_exchange(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    tensor = torch.randint(-99, 99, (3, 1365), generator=made).to(dtype)
    (known,) = fingerprints([tensor])
    assert fingerprints([tensor.clone(), tensor]) == [known, known]
    for at in range(0, tensor.numel(), 97):
        other = tensor.clone()
        other.view(-1)[at] += 1
        assert fingerprints([other]) != [known]
    for place in ((0, 1), (0, 4094), (7, 2055)):
        other = tensor.clone()
        flat = other.view(-1)
        flat[list(place)] = torch.tensor([5, 7]).to(dtype)
        swapped = other.clone()
        swapped.view(-1)[list(place)] = flat[list(place[::-1])]
        assert fingerprints([other]) != fingerprints([swapped])
