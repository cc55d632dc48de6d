"""Scaled mode: batch, learning rate and order for any ranks. Adasum: against a reference."""

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from parsl_freetrain import BadInput, FragmentContext, Scaled, load_weights
from parsl_freetrain.training.data.sample_order import GlobalOrder
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.adasum import combine, pair, pair_all
from tests.support.properties import holds_for
from tests.support.ranks import all_finish, ended, order
from tests.support.waiting import LIMIT_S

SIZE = 53  # no multiple of any batch below


def test_learning_rates() -> None:
    for rule, ranks_, factor in (
        ('linear', 8, 4.0),
        ('sqrt', 8, 2.0),
        ('none', 8, 1.0),
        (None, 6, 3.0),
        ('linear', 1, 0.5),
        ('sqrt', 2, 1.0),
    ):
        assert Scaled(reference_ranks=2, lr=rule).lr_factor(ranks_, 0) == factor  # type: ignore[arg-type]
    scaled = Scaled(reference_ranks=1, lr='linear', warmup_samples=1000)
    factors = [scaled.lr_factor(5, samples) for samples in (0, 250, 500, 1000, 10**6)]
    assert factors == [1.0, 2.0, 3.0, 5.0, 5.0]
    assert Scaled(reference_ranks=4, lr='linear', warmup_samples=1000).lr_factor(2, 0) == 0.5
    assert Scaled(reference_ranks=1, combine='adasum').lr_factor(64, 0) == 1.0


def test_what_cannot_be_meant() -> None:
    for settings, sentence in (
        ({'reference_ranks': 0}, 'reference_ranks is 0'),
        ({'warmup_samples': -1}, 'warmup_samples is -1'),
        ({'combine': 'median'}, "combine is 'median'"),
        ({'lr': 'cubic'}, "lr is 'cubic'"),
        ({'lr': 'linear', 'combine': 'adasum'}, 'leave lr out'),
    ):
        with pytest.raises(BadInput, match=sentence):
            Scaled(**settings)


def test_the_batch_grows_with_the_ranks() -> None:
    assert [Scaled(reference_ranks=4).batch_size(32, n) for n in (1, 4, 6)] == [8, 32, 48]
    with pytest.raises(BadInput, match='30 is no multiple of 4'):
        Scaled(reference_ranks=4).batch_size(30, 2)


def test_the_order_of_samples_is_the_same_for_any_batches() -> None:
    def walk(sizes: list[int]) -> list[int]:
        seen: list[int] = []
        while len(seen) < 2 * SIZE:
            size = sizes[len(seen) % len(sizes)]
            batches = GlobalOrder(SIZE, size, 3, total_samples=2 * SIZE, aligned=False)
            seen += next(iter(batches.batches(len(seen)))).indices
        return seen

    assert walk([1]) == walk([4, 8, 12]) == walk([60, 7])


def train(ctx: FragmentContext, folder: Path, stop_at: int | None) -> None:
    import time

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ctx.samples_lr(optimizer, lambda samples: 1 / (1 + samples))
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    before = model.weight.detach().clone() if ctx.world_size == 1 else None
    for (batch,) in ctx.loop(list(zip(torch.arange(float(SIZE)).unsqueeze(1), strict=True)), 4):
        base = optimizer.param_groups[0]['lr']
        assert math.isclose(base, 0.1 / (1 + ctx.samples)), (base, ctx.samples)
        with (folder / f'seen-{ctx.fragment}-{ctx.rank}').open('a') as file:
            file.write(json.dumps([ctx.samples, batch.flatten().tolist()]) + '\n')
        if stop_at is not None and ctx.samples >= stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        model(batch).sum().mul(0.0).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.1)  # so that the ranks agree to stop within two or three steps
    assert before is None or torch.equal(before, model.weight)


def test_every_sample_once_per_epoch_over_rescales(fork_server: ForkClient, tmp_path: Path) -> None:
    epochs = 3
    for fragment, (world_size, stop_at) in enumerate([(1, 8), (3, 40), (2, 100), (3, None)], 1):
        ordered = order(tmp_path, fragment, mode='scaled', total_samples=epochs * SIZE)
        outcomes = ended(fork_server, ordered, world_size, tmp_path, train, tmp_path, stop_at)
        how = 'finished' if stop_at is None else 'stopped'
        assert {outcome.how for outcome in outcomes} == {how}, outcomes
    batches: dict[int, list[float]] = {}
    for path in sorted(tmp_path.glob('seen-*')):
        for line in path.read_text().splitlines():
            samples, values = json.loads(line)
            batches.setdefault(samples, []).extend(values)
    # A rank without a sample in the last batch of an epoch trains one that does not count, the
    # batch's first; it is in there twice.
    sizes = [
        min(b - a, SIZE)
        for a, b in zip(sorted(batches), [*sorted(batches)[1:], epochs * SIZE], strict=True)
    ]
    seen = Counter(
        value
        for (_, values), size in zip(sorted(batches.items()), sizes, strict=True)
        for value in (set(values) if len(values) > size else values)
    )
    assert seen == dict.fromkeys(map(float, range(SIZE)), epochs)
    assert {4, 8, 12} < set(sizes)
    assert sum(sizes) == epochs * SIZE


def lrs(ctx: FragmentContext) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    moved = []
    for x in ctx.loop(torch.ones(32, 1), 4):
        optimizer.zero_grad()
        before = float(next(model.parameters()))
        (-model(x).mean()).backward()
        optimizer.step()
        moved.append(float(next(model.parameters())) - before)
        assert optimizer.param_groups[0]['lr'] == 0.25
    assert moved == [0.25, 0.375, 0.5, 0.5], moved


def test_the_step_is_scaled_but_not_what_is_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, mode='scaled', total_samples=32, scaled=Scaled(warmup_samples=16))
    all_finish(fork_server, ordered, 2, tmp_path, lrs)


def vectors(seed: int, count: int, size: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(count)]


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The published rule, term by term."""
    dot, one, other = float(a @ b), float(a @ a), float(b @ b)
    return (1.0 if one == 0 else 1 - dot / (2 * one)) * a + (
        1.0 if other == 0 else 1 - dot / (2 * other)
    ) * b


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """What is beyond a power of two first goes to the first ones, then neighbours."""
    core = 1 << (len(parts).bit_length() - 1)
    parts = [
        reference(p, parts[core + i]) if core + i < len(parts) else p
        for i, p in enumerate(parts[:core])
    ]
    while len(parts) > 1:
        parts = [reference(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def test_orthogonal_gradients_are_added_equal_ones_stay_and_opposite_ones_vanish() -> None:
    a, b = torch.tensor([3.0, 0, 0]), torch.tensor([0, 0, -2.0])
    assert torch.equal(pair(a, b), a + b)
    (a,) = vectors(0, 1)
    zero = torch.zeros_like(a)
    torch.testing.assert_close(pair(a, a), a)
    torch.testing.assert_close(pair(a, -a), zero)
    assert torch.equal(pair(a, zero), a) and torch.equal(pair(zero, zero), zero)
    half = torch.full((1000,), 300.0, dtype=torch.float16)  # its square is beyond half precision
    assert torch.equal(pair(half, half), half) and pair(half, half).dtype == torch.float16


@holds_for(tries=50, seed=st.integers(0, 10_000), exponent=st.integers(-20, 20))
def test_symmetric_and_equivariant_under_scaling(seed: int, exponent: int) -> None:
    a, b = vectors(seed, 2)
    torch.testing.assert_close(pair(a, b), pair(b, a))
    scale = 2.0**exponent
    torch.testing.assert_close(pair(scale * a, scale * b), scale * pair(a, b), rtol=1e-12, atol=0)
    torch.testing.assert_close(pair(a, b), reference(a, b))


def test_each_tensor_has_its_own_dot_product() -> None:
    a, b = vectors(1, 2, 5)
    torch.testing.assert_close(
        pair_all(a, b, [2, 3]), torch.cat([reference(a[:2], b[:2]), reference(a[2:], b[2:])])
    )
    assert not torch.allclose(pair_all(a, b, [2, 3]), reference(a, b))


@pytest.mark.parametrize('world_size', [1, 2, 3, 6, 8])
def test_every_rank_gets_the_tree_over_all(world_size: int) -> None:
    """Ranks in threads, which meet at each exchange."""
    from concurrent.futures import ThreadPoolExecutor
    from queue import SimpleQueue

    parts = vectors(world_size, world_size)
    wires: dict[tuple[int, int], SimpleQueue[torch.Tensor]] = {
        (a, b): SimpleQueue() for a in range(world_size) for b in range(world_size)
    }

    def run(rank: int) -> torch.Tensor:
        def sendrecv(row: torch.Tensor, partner: int) -> torch.Tensor:
            wires[rank, partner].put(row.clone())
            return wires[partner, rank].get(timeout=LIMIT_S)

        return combine(parts[rank], [parts[rank].numel()], rank, world_size, sendrecv)

    with ThreadPoolExecutor(world_size) as pool:
        got = list(pool.map(run, range(world_size)))
    assert all(torch.equal(got[0], other) for other in got)
    torch.testing.assert_close(got[0], tree(parts), rtol=1e-12, atol=1e-12)


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def one_step(ctx: FragmentContext) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for x in ctx.loop(X, 6, shuffle=False):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def test_a_step_of_real_ranks(fork_server: ForkClient, tmp_path: Path) -> None:
    world_size, scaled = 3, Scaled(combine='adasum')
    ordered = order(tmp_path, mode='scaled', scaled=scaled, total_samples=6 * world_size)
    outcomes = all_finish(fork_server, ordered, world_size, tmp_path, one_step)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gradients = []
    for rank in range(world_size):
        model.zero_grad()
        model(X[6 * rank : 6 * rank + 6]).pow(2).mean().backward()
        own = [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]
        gradients.append(own)
    trained = load_weights(outcomes[0].path)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        step = tree([own[i] for own in gradients]).view_as(parameter)
        torch.testing.assert_close(
            trained[name], parameter.detach() - 0.5 * step, rtol=1e-12, atol=1e-12
        )
