"""Where a model's parts have copies, the last step's state survives the kill of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain.core.model.events import FragmentStarted
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.checkpoint.export import same_weights
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import StateUsed
from tests.support.ranks import KILLED, order, ranks, running_fork_server

SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(data=2, shard=2)}
BATCH, TOTAL = 4, 48


def train(
    ctx: FragmentContext, kill: tuple[int, str] | None = None, remembers: bool = False
) -> None:
    """Kills a rank of fragment 1 at 24 samples, in the midst of a step."""

    def die(where: str) -> None:
        if ctx.fragment == 1 and ctx.samples == 24 and (ctx.rank, where) == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with torch.device('meta'):
        model: Any = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
    model = ctx.shard(model, blocks=(nn.Linear,))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = ctx.samples_lr(optimizer, lambda samples: 1.0 / (1 + samples / 20))
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    model[1].register_forward_hook(lambda *_: die('forward'))
    if remembers and ctx.is_main and ctx.fragment == 2:
        assert ctx.state == {'seen': ctx.samples - BATCH}
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    for (features,) in ctx.loop(TensorDataset(x), BATCH):
        if remembers and ctx.is_main:
            ctx.state['seen'] = ctx.samples
        optimizer.zero_grad()
        loss = model(features).pow(2).sum()
        die('before backward')
        loss.backward()
        optimizer.step()
        schedule.step()


@pytest.fixture(scope='module')
def nodes(
    fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ForkClient]]:
    """The fork servers of two nodes."""
    with running_fork_server(tmp_path_factory.mktemp('other'), fork_server.name) as other:
        yield [fork_server, other]


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp('alone')
    ordered = order(folder, total_samples=TOTAL, shape=SHAPES[1], shapes=SHAPES)
    with ranks(fork_server, ordered, 1, folder, train) as gang:
        return str(gang.run()[0].path)


@pytest.mark.parametrize(
    ('kill', 'remembers'),
    [((3, 'forward'), False), ((0, 'before backward'), False), ((1, 'forward'), True)],
)
def test_after_a_kill_the_last_step_is_gone_on_from(
    nodes: list[ForkClient],
    tmp_path: Path,
    undisturbed: str,
    kill: tuple[int, str],
    remembers: bool,
) -> None:
    ordered = order(
        tmp_path, total_samples=TOTAL, shape=SHAPES[4], shapes=SHAPES, trainer=tmp_path.name
    )
    with ranks(nodes, ordered, 4, tmp_path, train, kill, remembers) as gang:
        outcomes = gang.run()
        said = bool(gang.ranks[0].said(StateUsed))
        assert gang.ranks[1].said(FragmentStarted)[0].keeps
    assert said == remembers
    assert outcomes[kill[0]] is KILLED
    left = [outcome.left for outcome in outcomes if outcome.left is not None]
    assert {(one.samples, one.parts) for one in left} == {(24, 2)}
    assert {one.part for one in left} == {0, 1}
    parts = tuple(tuple(one.digest for one in left if one.part == part) for part in range(2))
    following = replace(ordered, fragment=2, shape=SHAPES[2], handover=Handover(parts, 24))
    with ranks(nodes, following, 2, tmp_path, train, None, remembers) as gang:
        outcomes = gang.run()
        assert {outcome.how for outcome in outcomes} == {'finished'}, [
            rank.log.read_text() for rank in gang.ranks
        ]
        assert gang.ranks[0].said(FragmentStarted)[0].samples == 24
    assert same_weights(outcomes[0].path, undisturbed)
