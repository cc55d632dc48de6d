"""A rank that the kernel ends because memory is full."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parsl_freetrain import FragmentContext, LocalSite, Scaling, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until

V1, V2 = Path('/sys/fs/cgroup/memory'), Path('/sys/fs/cgroup')
LIMIT_BYTES = 400 << 20


@pytest.fixture
def small() -> Iterator[Path]:
    """A cgroup with little memory."""
    mount, limit = (
        (V1, 'memory.limit_in_bytes')
        if (V1 / 'memory.limit_in_bytes').exists()
        else (V2, 'memory.max')
    )
    group = mount / f'freetrain-test-{os.getpid()}'
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f'no cgroup of memory can be made here: {error}')
    yield group
    wait_until(lambda: not (group / 'cgroup.procs').read_text())
    group.rmdir()


def train(ctx: FragmentContext, group: str) -> None:
    """One node has too little memory for it."""
    if ctx.world_size == 1:
        for pid in (os.getppid(), os.getpid()):  # the node's fork server, whose count is looked at
            (Path(group) / 'cgroup.procs').write_text(str(pid))
        torch.ones(LIMIT_BYTES)
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x in ctx.loop(torch.ones(8, 2), 4):
        model(x).mean().backward()
        optimizer.step()


def test_a_rank_ended_for_lack_of_memory_needs_more_nodes(tmp_path: Path, small: Path) -> None:
    with freetrain(tmp_path, LocalSite(nodes=2, poll_s=0.2)) as executor:
        app = freetrain_app(sizes=(1, 2), total_epochs=2, scaling=Scaling(rate={1: 2.0, 2: 1.0}))
        app(train)(str(small)).result(LIMIT_S)
    with Journal(executor.ledger_path) as ledger:
        fragments = ledger.history().fragments
    assert [len(fragment.nodes) for fragment in fragments] == [1, 2]
    assert [fragment.ending for fragment in fragments] == ['failed', 'finished']
    assert ' was ended by the kernel, since memory was full; ' in fragments[0].error
