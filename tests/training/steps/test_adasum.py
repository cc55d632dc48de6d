"""Adasum: the rule's properties, and the tree over real ranks against a reference in double
precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from parsl_freetrain import FragmentContext, Scaled, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.adasum import combine, pair, pair_all
from tests.support.properties import holds_for
from tests.support.ranks import order, ranks
from tests.support.waiting import LIMIT_S


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
    """The documented order: what is beyond a power of two first goes to the first ones, then
    neighbours.
    """
    core = 1 << (len(parts).bit_length() - 1)
    parts = [
        reference(p, parts[core + i]) if core + i < len(parts) else p
        for i, p in enumerate(parts[:core])
    ]
    while len(parts) > 1:
        parts = [reference(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def test_orthogonal_gradients_are_added() -> None:
    a, b = torch.tensor([3.0, 0, 0]), torch.tensor([0, 0, -2.0])
    assert torch.equal(pair(a, b), a + b)


def test_equal_gradients_stay_and_opposite_ones_vanish() -> None:
    (a,) = vectors(0, 1)
    torch.testing.assert_close(pair(a, a), a)
    torch.testing.assert_close(pair(a, -a), torch.zeros_like(a))


def test_a_zero_changes_nothing() -> None:
    (a,) = vectors(0, 1)
    assert torch.equal(pair(a, torch.zeros_like(a)), a)
    assert torch.equal(pair(torch.zeros_like(a), torch.zeros_like(a)), torch.zeros_like(a))


@holds_for(tries=50, seed=st.integers(0, 10_000), exponent=st.integers(-20, 20))
def test_symmetric_and_equivariant_under_scaling(seed: int, exponent: int) -> None:
    a, b = vectors(seed, 2)
    torch.testing.assert_close(pair(a, b), pair(b, a))
    scale = 2.0**exponent
    torch.testing.assert_close(pair(scale * a, scale * b), scale * pair(a, b), rtol=1e-12, atol=0)
    torch.testing.assert_close(pair(a, b), reference(a, b))


def test_half_precision_does_not_overflow() -> None:
    a = torch.full((1000,), 300.0, dtype=torch.float16)  # its square is beyond half precision
    assert torch.equal(pair(a, a), a)
    assert pair(a, a).dtype == torch.float16


def test_each_tensor_has_its_own_dot_product() -> None:
    a, b = vectors(1, 2, 5)
    torch.testing.assert_close(
        pair_all(a, b, [2, 3]), torch.cat([reference(a[:2], b[:2]), reference(a[2:], b[2:])])
    )
    assert not torch.allclose(pair_all(a, b, [2, 3]), reference(a, b))


@pytest.mark.parametrize('world_size', [1, 2, 3, 4, 6, 7, 8])
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


@pytest.mark.parametrize('world_size', [3, 4])
def test_a_step_of_real_ranks(fork_server: ForkClient, tmp_path: Path, world_size: int) -> None:
    ordered = order(
        tmp_path, mode='scaled', scaled=Scaled(combine='adasum'), total_samples=6 * world_size
    )
    with ranks(fork_server, ordered, world_size, tmp_path, one_step) as gang:
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gradients = []
    for rank in range(world_size):
        model.zero_grad()
        model(X[6 * rank : 6 * rank + 6]).pow(2).mean().backward()
        gradients.append(
            [
                parameter.grad.flatten().clone()
                for parameter in model.parameters()
                if parameter.grad is not None
            ]
        )
    trained = load_weights(outcomes[0].path)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        step = tree([own[i] for own in gradients]).view_as(parameter)
        torch.testing.assert_close(
            trained[name], parameter.detach() - 0.5 * step, rtol=1e-12, atol=1e-12
        )
