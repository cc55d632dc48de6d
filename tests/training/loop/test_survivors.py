"""When a rank is killed, the others leave their state, and the next fragment goes on from it."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, load_weights
from parsl_freetrain.core.model.events import CheckpointSaved, FragmentStarted
from parsl_freetrain.training.checkpoint import fault_hooks
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import StateUsed
from tests.support.examples import equal
from tests.support.ranks import KILLED, order, ranks
from tests.support.waiting import LIMIT_S

BATCH, TOTAL, EPOCH = 8, 96, 48
Fault = tuple[int, int, str]  # rank, samples at the beginning of its step, and where in it


def train(
    ctx: FragmentContext,
    faults: dict[int, list[Fault]],
    remembers: bool = False,
    forgets: bool = False,
) -> None:
    """Each is struck as ``faults`` says; nothing counts twice. ``forgets``: a cut changes it."""
    mine = [(at, p) for rank, at, p in faults.get(ctx.fragment, ()) if ctx.rank == rank]

    def struck(point: str) -> bool:
        return (ctx.samples, point) in mine

    def die(point: str) -> None:
        if struck(point):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(2)
    model: Any = nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = ctx.samples_lr(optimizer, lambda samples: 1.0 / (1 + samples / 100))
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    average = ctx.ema(model, 0.9)
    assert ctx._run.model is not None
    steps: Any = ctx._run.model.steps
    timing: Any = ctx._run.checkpointer.timing
    took = timing.step_took
    timing.step_took = lambda seconds: took(0.01)  # on a busy computer, too
    exchange: Any = getattr(steps, '_exchange', None)

    def exchanged(*arguments: Any) -> Any:
        die('in the exchange')
        answer = exchange(*arguments)
        die('behind the exchange')
        return answer

    if exchange is not None:
        vars(steps)['_exchange'] = exchanged
        total = steps._sum.total

        def summed(present: Any) -> Any:
            die('in the sum')
            return total(present)

        steps._sum.total = summed
    ctx.after_step(lambda: die('behind the step'))

    def end_of_epoch() -> None:
        die('at the end of the epoch')
        x = torch.ones(8, 4)
        ctx.report(
            **ctx.evaluate(
                average, TensorDataset(x), lambda m, b: {'size': m(b[0])[:, 0]}, batch_size=4
            )
        )

    ctx.each_epoch(end_of_epoch)
    if any(point == 'while it saves' for _, point in mine):
        fault_hooks.on_saving.append(lambda stage: os.kill(os.getpid(), signal.SIGKILL))
    if any(point == 'while it leaves' for _, point in mine):

        def leaves(stage: str) -> None:
            if stage == 'leaving':
                os.kill(os.getpid(), signal.SIGKILL)

        fault_hooks.on_saving.append(leaves)
    if remembers and ctx.is_main and ctx.samples:
        assert ctx.state == {'seen': {ctx.samples - BATCH: (1, 2)}}  # with its types
    x = torch.randn(EPOCH, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH):
        die('in the body')
        assert optimizer.param_groups[0]['lr'] == 0.01 * (1.0 / (1 + ctx.samples / 100))
        if struck('while it saves'):
            time.sleep(LIMIT_S)
        for group in optimizer.param_groups:  # every virtual shard begins with the step's settings
            group['weight_decay'] = group['weight_decay'] / 2 + 1e-3
        if remembers:
            ctx.state['seen'] = {ctx.samples: (1, 2)}
        optimizer.zero_grad()
        ((model(features) - target - forgets * ctx.fragment) ** 2).mean().backward()
        optimizer.step()
        schedule.step()


@pytest.fixture(scope='module')
def nodes(fork_server: ForkClient, neighbour: ForkClient) -> list[ForkClient]:
    return [fork_server, neighbour]


_names = itertools.count()


class Training:
    """Fragments one after the other, each from the best state that the one before has left."""

    def __init__(self, nodes: list[ForkClient], folder: Path, mode: str = 'reproducible') -> None:
        self.nodes, self.folder = nodes, folder
        # Fragments of a trainer have their own numbers, also on the nodes of all tests here.
        self.order = order(folder, total_samples=TOTAL, mode=mode, trainer=f'digits-{next(_names)}')
        self.left: tuple[list[ForkClient], Handover] | None = None
        self.number = 0

    def fragment(
        self,
        world_size: int,
        faults: dict[int, list[Fault]],
        function: Callable[..., None] = train,
        **options: Any,
    ) -> tuple[int, list[Any]]:
        """The samples that the next fragment begins with, and its outcomes."""
        self.number += 1
        at, handover = self.left or (self.nodes, None)
        ordered = replace(self.order, fragment=self.number, handover=handover)
        places = [at[rank % len(at)] for rank in range(world_size)]
        with ranks(places, ordered, world_size, self.folder, function, faults, **options) as gang:
            outcomes = gang.run()
            self.gang = gang
            started = [rank.said(FragmentStarted) for rank in gang.ranks]
            began = next(said[0].samples for said in started if said)
        self.left = None
        left = [(o.left.samples, -i) for i, o in enumerate(outcomes) if o.left is not None]
        if left:
            best = -max(left)[1]
            kept = outcomes[best].left
            home = places[best]
            others = [node for node in self.nodes if node is not home]
            self.left = [home, *others], Handover(((kept.digest,),), kept.samples)
        return began, outcomes

    def weights(self) -> dict[str, torch.Tensor]:
        """Those at the end."""
        latest = PosixCheckpointStore(Path(self.order.store), self.order.trainer).latest()
        assert latest is not None
        assert latest.samples == TOTAL
        return load_weights(latest)


@pytest.fixture(scope='module')
def undisturbed(
    nodes: list[ForkClient], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    training = Training(nodes, tmp_path_factory.mktemp('undisturbed'))
    assert training.fragment(1, {})[1][0].how == 'finished'
    return training.weights()


def test_a_kill_anywhere_in_a_step_repeats_no_step_that_all_have_ended(
    nodes: list[ForkClient], tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Each fragment begins where its survivors were, which none of them has written to disk."""
    told: list[tuple[int, Fault, int]] = [  # ranks, fault, samples that the next one begins with
        (3, (1, 16, 'in the body'), 16),
        (2, (0, 24, 'in the exchange'), 24),
        (3, (0, 32, 'behind the exchange'), 40),
        (4, (2, 40, 'in the body'), 40),  # in its first step
        (3, (1, 48, 'at the end of the epoch'), 48),  # which is done again
        (3, (2, 56, 'behind the step'), 56),
        (2, (1, 64, 'in the sum'), 64),
    ]
    faults = {number: [fault] for number, (_, fault, _) in enumerate(told, 1)}
    training, begins = Training(nodes, tmp_path), 0
    for count, fault, following in told:
        began, outcomes = training.fragment(count, faults)
        assert began == begins, fault
        assert [o.how for i, o in enumerate(outcomes) if i != fault[0]] == ['peer-lost'] * (
            count - 1
        )
        # One copy for each node, although all ranks are as far.
        assert 1 <= sum(o.left is not None for o in outcomes) <= 2
        assert training.left is not None
        begins = following
        assert training.left[1].samples == following, fault
    began, outcomes = training.fragment(2, {})
    assert began == begins
    assert {o.how for o in outcomes} == {'finished'}
    assert equal(training.weights(), undisturbed)
    saved = training.gang.ranks[0].said(CheckpointSaved)[-1].checkpoint
    # By the virtual shards that survivors have computed, and that a rank has by itself again.
    assert (saved.resumes, saved.verified) == (7, 4)


def test_what_survivors_have_computed_of_a_step_shows_that_a_training_differs(
    nodes: list[ForkClient], tmp_path: Path
) -> None:
    training = Training(nodes, tmp_path)
    training.fragment(3, {1: [(1, 16, 'in the body')]}, forgets=True)
    _, outcomes = training.fragment(2, {}, forgets=True)
    (error,) = [o.error for o in outcomes if o.how == 'error']
    assert 'fragment 2 does not continue what fragment 1 began: after 16' in error.message
    assert "the gradient of parameter '0.weight' (and " in error.message
    assert ' others) in the virtual shards ' in error.message  # of who was as far


def test_a_kill_while_it_is_saved_or_left_costs_no_more(
    nodes: list[ForkClient], tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    told: list[tuple[int, list[Fault], range]] = [
        (3, [(1, 16, 'in the body')], range(16, 17)),
        # A survivor dies while it leaves its state. There is that of the other node.
        (3, [(0, 32, 'in the body'), (2, 0, 'while it leaves')], range(32, 33)),
        # All die, and the fragment before has left its state for another time.
        (2, [(0, 32, 'in the body'), (1, 32, 'in the body')], range(32, 33)),
        # It writes what it was handed over after its first step, and rank 0 dies of it.
        (3, [(0, 56, 'while it saves')], range(40, 57)),
    ]
    faults = {number: struck for number, (_, struck, _) in enumerate(told, 1)}
    training, begins = Training(nodes, tmp_path), 0
    for count, struck, following in told:
        before = training.left
        began, _ = training.fragment(count, faults)
        assert began == begins, struck
        training.left = training.left or before
        assert training.left is not None
        begins = training.left[1].samples
        assert begins in following, struck
    began, outcomes = training.fragment(2, {})
    assert (began, {o.how for o in outcomes}) == (begins, {'finished'})
    assert equal(training.weights(), undisturbed)


@pytest.mark.parametrize('victim', [0, 1])
def test_what_rank_0_has_is_not_forgotten(
    nodes: list[ForkClient], tmp_path: Path, victim: int
) -> None:
    """Its ``ctx.state`` counts, so without it the checkpoint is used."""
    training = Training(nodes, tmp_path)
    _, outcomes = training.fragment(2, {1: [(victim, 24, 'in the body')]}, remembers=True)
    assert [o.left is not None for o in outcomes if o is not KILLED] == [victim == 1]
    said = training.gang.ranks
    assert [bool(rank.said(StateUsed)) for rank in said] == [True, False]
    began, outcomes = training.fragment(1, {}, remembers=True)
    assert began == (24 if victim == 1 else 0)
    assert {o.how for o in outcomes} == {'finished'}


class Patience:
    def __init__(self) -> None:
        self.left = 0.0


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / (1 + self.calls)


def train_by_variables(ctx: FragmentContext, faults: dict[int, list[Fault]], size: int = 1) -> None:
    """What the body changes at its beginning, before a rank is lost, decides the next loss."""
    torch.manual_seed(2)
    model: Any = Counting(4, 1)
    model.calls = 0
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    odd, total, history, patience = False, 0.0, [0.5] * size, Patience()
    array, tensor = np.zeros(2), torch.zeros(2)
    x = torch.randn(EPOCH, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH):
        odd = not odd
        total += 1.0
        history.append(total)
        patience.left += 0.5
        array += 1
        tensor += 1
        output = model(features)
        for rank, samples, _ in faults.get(ctx.fragment, ()):
            if (ctx.rank, ctx.samples) == (rank, samples):
                os.kill(os.getpid(), signal.SIGKILL)
        known = total + len(history) + patience.left + array.sum() + float(tensor.sum())
        scale = 1 / (1 + odd + known)
        optimizer.zero_grad()
        (scale * (output - target) ** 2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(('killed', 'size', 'following'), [(1, 1, 40), (1, 50_000, 0), (0, 1, 0)])
def test_variables_are_those_at_the_end_of_the_last_batch(
    nodes: list[ForkClient], tmp_path: Path, killed: int, size: int, following: int
) -> None:
    """Where copies are too many, or rank 0 is lost, whose count, the checkpoint is used."""
    told: dict[str, dict[int, list[Fault]]] = {'without': {}, 'with': {1: [(killed, 40, '')]}}
    found = {}
    for name, faults in told.items():
        training = Training(nodes, tmp_path / name, 'throughput')
        began = [
            training.fragment(2, faults, train_by_variables, size=size)[0]
            for _ in range(1 + len(faults))
        ]
        assert began == [0, following][: len(began)]
        found[name] = training.weights()
    assert equal(found['with'], found['without'])
