"""The parts of a sharded state stay in the memory of the nodes from one fragment to the next."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain.core.model.events import FragmentProgressed
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.checkpoint.export import same_weights
from parsl_freetrain.training.checkpoint.manifest import MARKER
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import StopTraining
from tests.support.ranks import KILLED, Ranks, order, ranks

SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}
BATCH, SIZE, TOTAL = 4, 8, 80


def train(ctx: FragmentContext, store: str = '', kill: int = 0) -> None:
    """Fragment 1 saves after its first epoch; then rank ``kill`` dies, or all wait for the end."""
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
    model = ctx.shard(model, blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    ctx.each_epoch(lambda: ctx.checkpoint() if ctx.fragment == 1 else None)
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1))
    for (features,) in ctx.loop(TensorDataset(x), BATCH):
        if store and ctx.fragment == 1 and ctx.samples >= SIZE:
            while not list(Path(store).glob(f'ckpt-*/{MARKER}')):
                time.sleep(0.01)
            if kill and ctx.rank == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)
        optimizer.zero_grad()
        model(features).pow(2).sum().backward()
        optimizer.step()


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last checkpoint of one rank that is not disturbed."""
    folder = tmp_path_factory.mktemp('alone')
    ordered = order(folder, total_samples=TOTAL, shape=SHAPES[1], shapes=SHAPES)
    with ranks(fork_server, ordered, 1, folder, train) as gang:
        return str(gang.run()[0].path)


def fragment(
    nodes: list[ForkClient],
    folder: Path,
    number: int,
    count: int,
    *,
    stop: bool = False,
    **how: Any,
) -> tuple[Ranks, list[Any]]:
    ordered = order(
        folder, number, total_samples=TOTAL, shape=SHAPES[count], shapes=SHAPES, trainer=folder.name
    )
    given = {'store': ordered.store, **how}
    with ranks(nodes, ordered, count, folder, train, **given) as gang:
        if stop:
            gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
            for rank in gang.ranks:
                rank.process.send(StopTraining('test'))
        return gang, gang.run()


def spoil(folder: Path, *writers: int) -> None:
    """Whoever reads these ranks' files of the newest checkpoint from the disk notices."""
    newest = max((folder / 'store').glob('ckpt-*'))
    for writer in writers:
        file = newest / f'rank-{writer}.safetensors'
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)


def sources(gang: Ranks) -> list[tuple[bool, bool, bool]]:
    """By rank: whether it used its node's memory, another rank's, and whether it read files."""
    found = []
    for rank in gang.ranks:
        told = re.search(
            r'(\d+) bytes were in memory here, (\d+) came .* and (\d+) ', rank.log.read_text()
        )
        assert told, rank.log.read_text()
        here, others, read = map(int, told.groups())
        found.append((here > 0, others > 0, read > 0))
    return found


def test_after_a_rescale_nothing_is_read_that_a_node_has_kept(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    nodes = [fork_server, neighbour]
    _, outcomes = fragment(nodes, tmp_path, 1, 4, stop=True)
    assert [outcome.how for outcome in outcomes] == ['stopped'] * 4
    spoil(tmp_path, 0, 1, 2, 3)
    gang, outcomes = fragment(nodes, tmp_path, 2, 2)
    assert [outcome.how for outcome in outcomes] == ['finished'] * 2
    assert sources(gang) == [(True, True, False)] * 2
    assert same_weights(outcomes[0].path, undisturbed)


def test_what_went_with_its_node_is_read_from_the_same_checkpoint(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    fragment([fork_server, neighbour], tmp_path, 1, 2, stop=True)
    spoil(tmp_path, 0)
    gang, outcomes = fragment([fork_server], tmp_path, 2, 1)
    assert sources(gang) == [(True, False, True)]
    assert same_weights(outcomes[0].path, undisturbed)


def test_after_a_kill_the_survivors_have_their_parts_of_the_last_checkpoint(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    nodes = [fork_server, neighbour]
    _, outcomes = fragment(nodes, tmp_path, 1, 2, kill=1)
    assert outcomes[1] is KILLED
    assert outcomes[0].how == 'peer-lost'
    spoil(tmp_path, 0)
    gang, outcomes = fragment(nodes, tmp_path, 2, 2)
    assert [outcome.how for outcome in outcomes] == ['finished'] * 2
    assert sources(gang) == [(True, False, True), (False, True, False)]  # rank 0 reads for both
    assert same_weights(outcomes[0].path, undisturbed)
