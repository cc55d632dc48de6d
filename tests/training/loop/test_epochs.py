"""What is done at the end of an epoch, and metrics: the same for any number of ranks and cuts."""

import copy
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.loop.loop_state import FragmentEnd
from parsl_freetrain.training.loop.wishes import EvaluationStopped
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.notes import mean
from tests.support.cuts import cut, refused, trained, whole_and_cut
from tests.support.cuts import made as small
from tests.support.examples import equal, in_this_process, refused_here
from tests.support.ranks import in_ranks
from tests.support.waiting import wait_until

DATA = TensorDataset(torch.arange(44.0).reshape(22, 2) / 44)
HELD_OUT = TensorDataset(torch.linspace(-3, 5, 34).reshape(17, 2))
BEST = 0.5, 0.1, 0.9  # what is said of each epoch's checkpoint; the least is the best


def made(ctx: FragmentContext) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return tuple(ctx.prepare(model, optimizer, schedule, AveragedModel(model)))


def measure(model: Any, batch: Any) -> dict[str, Any]:
    out = model(batch[0])[:, 0]
    return {'loss': out.square(), 'above': out > 0, 'sum': (out.sum(), 2 * len(out))}


def measured_until(ctx: Any, stop_at: int, model: Any, batch: Any) -> dict[str, Any]:
    if stop_at == -1 - ctx.epoch and ctx.fragment == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return measure(model, batch)


def train(ctx: FragmentContext, stop_at: int = 0, by_epochs: bool = False) -> None:
    """Evaluates each epoch, keeps the best; stops at ``stop_at``, negative: in an evaluation."""
    model, optimizer, schedule, average = made(ctx)
    measured, own = partial(measured_until, ctx, stop_at), np.random.default_rng(3)
    ends = 0

    def end_of_epoch() -> None:
        nonlocal ends
        ends += ctx.epoch > 0  # as often, if an evaluation is stopped and the end is repeated
        next(model.buffers()).mul_(0.9)
        ctx.state.setdefault('begun', []).append(ctx.epoch)
        schedule.step()
        average.update_parameters(model)
        found = ctx.evaluate(model, Subset(HELD_OUT, range(17)), measured, batch_size=2)
        found['drawn'] = own.random() + np.random.rand()  # whatever batches a rank has evaluated
        found['ends'] = ends
        ctx.state.setdefault('found', []).append([ctx.epoch, ctx.samples, found, ctx.metrics])
        ctx.checkpoint(best=BEST[ctx.epoch])

    def loop() -> float:
        for (x,) in ctx.loop(DATA, 8):
            cut(ctx, stop_at)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss, twice=2 * loss.item())
        return float(loss)  # the loop's variables are needed

    if not by_epochs:
        ctx.each_epoch(end_of_epoch)
        loop()
        return
    for epoch in ctx.epochs():
        model.train()
        assert loop() > 0 and epoch == ctx.epoch
        end_of_epoch()


run = partial(in_ranks, total_samples=66, shards=3)


def last(folder: Path) -> tuple[Any, Any]:
    checkpoint = PosixCheckpointStore(folder / 'store', 'digits').latest()
    assert checkpoint is not None
    return checkpoint, read_state(checkpoint.path)


@pytest.fixture(scope='module')
def whole_folder(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('undisturbed')
    trained(fork_server, folder, [1], train, total_samples=66, shards=3, keep=1)
    return folder


@pytest.mark.parametrize(
    ('by_epochs', 'stop_at'),
    [(False, 22), (False, -1), (False, -2), (True, 16), (True, -1)],
    ids=['after', 'in', 'in-second', 'epochs-at-end', 'epochs-in'],
)
def test_each_epoch_is_ended_once_with_the_same_figures(
    fork_server: ForkClient, tmp_path: Path, whole_folder: Path, by_epochs: bool, stop_at: int
) -> None:
    """Also if it stops in an epoch's last batch, or within the evaluation."""
    sizes = [3, 2] if by_epochs == (stop_at < 0) else [2, 1]
    one, whole = last(whole_folder)
    assert [row[:2] for row in whole.position.user['found']] == [[0, 22], [1, 44], [2, 66]]
    how: dict[str, Any] = {'total_samples': 66, 'shards': 3}
    trained(fork_server, tmp_path, sizes, train, stop_at, by_epochs, **how)
    checkpoint, other = last(tmp_path)
    assert other.position.user == whole.position.user
    assert other.schedulers == whole.schedulers and other.schedulers[0]['_step_count'] == 4
    for now, then in zip(other.models + other.averages, whole.models + whole.averages, strict=True):
        assert all(torch.equal(now[name], value) for name, value in then.items())
    assert checkpoint.metrics == one.metrics and checkpoint.metrics.keys() >= {'loss', 'twice'}
    assert checkpoint.metrics['twice'] == pytest.approx(2 * checkpoint.metrics['loss'])


class Rollout(Dataset[Any]):
    """What an epoch trains follows from the weights, as in reinforcement learning."""

    wanted: torch.Tensor

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, i: int) -> Any:
        return DATA[i][0], self.wanted[i]


def steps_by_epochs(ctx: FragmentContext, at: int) -> str:
    """A DataLoader that was prepared, schedules by epoch, random numbers, and an early end."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    data, dice = Rollout(), random.Random(1)
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, decay, loader = ctx.prepare(model, optimizer, decay, loader)
    for epoch in ctx.epochs():
        noise, data.wanted = torch.rand(()) + dice.random(), model(DATA.tensors[0]).detach() / 2
        for x, y in loader:
            cut(ctx, at)
            optimizer.zero_grad()
            ((model(x) - y).square().mean() * noise).backward()
            optimizer.step()
        decay.step()
        drawn = torch.rand(()).item()
        ctx.state.setdefault('seen', []).append([epoch, len(loader), decay.get_last_lr(), drawn])
        if epoch == 2:
            break
    return 'behind'


def test_what_is_done_by_epoch_for_any_cuts(fork_server: ForkClient, tmp_path: Path) -> None:
    forms = {'one': ([1], 0), 'first': ([2, 1], 8), 'cut': ([2, 1], 30), 'end': ([1, 1], 38)}
    for name, (sizes, at) in forms.items():
        how: dict[str, Any] = {'total_samples': 95, 'shards': 3}
        outcome = trained(fork_server, tmp_path / name, sizes, steps_by_epochs, at, **how)
        assert (outcome.samples, outcome.result) == (66, '"behind"')
    one, *others = (last(tmp_path / name)[1] for name in forms)
    seen = [row[:3] for row in one.position.user['seen']]
    assert seen == [[0, 3, [0.25]], [1, 3, [0.125]], [2, 3, [0.0625]]]
    for other in others:
        assert one.position.user == other.position.user
        assert all(torch.equal(other.models[0][name], its) for name, its in one.models[0].items())


def test_the_best_checkpoint_is_kept(whole_folder: Path) -> None:
    """Beside the last one, which alone is kept else."""
    kept = PosixCheckpointStore(whole_folder / 'store', 'digits').checkpoints()
    assert {c.samples: c.metrics['best'] for c in kept} == {44: BEST[1], 66: BEST[2]}


def test_only_judged_checkpoints_have_a_value(fork_server: ForkClient, tmp_path: Path) -> None:
    """Not the later ones of a fragment that began with a judged one."""
    store = PosixCheckpointStore(tmp_path / 'store', 'digits')

    def killed(ctx: FragmentContext, kill: bool) -> None:
        model, optimizer, *_ = made(ctx)
        ctx.each_epoch(lambda: ctx.checkpoint(best=0.5) if kill else None)
        for (x,) in ctx.loop(DATA, 8):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if kill and ctx.samples == 38:
                wait_until(lambda: store.latest() is not None, 'there is no checkpoint')
                os.kill(os.getpid(), signal.SIGKILL)

    run(fork_server, tmp_path, killed, True)
    run(fork_server, tmp_path, killed, False, fragment=2)
    found = {c.samples: c.metrics.get('best') for c in store.checkpoints()}
    assert found == {**dict.fromkeys(found), 22: 0.5} and 66 in found


def test_evaluation_in_throughput_mode(fork_server: ForkClient, tmp_path: Path) -> None:
    """All ranks find the same figures, with the batch statistics that are saved."""

    def look(ctx: FragmentContext) -> None:
        train(ctx)
        model, _ = ctx._run.model.prepared.models[0], None  # type: ignore[union-attr]
        ctx.state['last'] = ctx.evaluate(model, HELD_OUT, measure, batch_size=5)
        assert ctx.state['last']['loss'] == pytest.approx(ctx.state['found'][-1][2]['loss'])

    outcomes = run(fork_server, tmp_path, look, mode='throughput', world_size=2)
    assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
    saved = last(tmp_path)[1]
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    model.load_state_dict(saved.models[0])
    model.eval()
    with torch.no_grad():
        out = model(HELD_OUT.tensors[0])[:, 0].double()
    found = saved.position.user['last']
    assert found['loss'] == pytest.approx(float(out.square().mean()))
    assert found['above'] == pytest.approx(float((out > 0).double().mean()))
    assert found['sum'] == pytest.approx(float(out.mean()) / 2)


def evaluates_in_the_body(ctx: FragmentContext) -> None:
    model, *_ = made(ctx)
    for _ in ctx.loop(DATA, 8):
        ctx.evaluate(model, HELD_OUT, measure, batch_size=2)


def returns_a_mean(ctx: FragmentContext) -> None:
    model, *_ = made(ctx)
    ctx.evaluate(model, HELD_OUT, lambda m, b: {'loss': m(b[0]).mean()}, batch_size=2)


def slopes(model: Any, batch: Any) -> dict[str, Any]:
    x = batch[0].requires_grad_()
    out = model(x)[:, 0]
    return {'loss': out, 'slope': torch.autograd.grad(out.sum(), x)[0].norm(dim=1)}


def needs_gradients(ctx: FragmentContext) -> None:
    model, *_ = made(ctx)
    found = ctx.evaluate(model, HELD_OUT, slopes, batch_size=2, gradients=True)
    assert found['slope'] > 0 and all(p.grad is None for p in model.parameters())
    assert model(HELD_OUT.tensors[0]).requires_grad
    ctx.evaluate(model, HELD_OUT, slopes, batch_size=2)


def checkpoints_in_the_body(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.loop(DATA, 8):
        ctx.checkpoint(best=1.0)


def epochs_without_a_loop(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.epochs():
        pass


def leaves_a_loop(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.epochs():
        for _ in ctx.loop(DATA, 8):
            break


def two_loops(ctx: FragmentContext) -> None:
    model, optimizer, *_ = made(ctx)
    for _ in ctx.epochs():
        for (x,) in chain.from_iterable(ctx.loop(DATA, 8) for _ in range(2)):
            model(x).mean().backward()
            optimizer.step()


def data_by_epoch(ctx: FragmentContext) -> None:
    model, optimizer, *_ = made(ctx)
    for epoch in ctx.epochs():
        for (x,) in ctx.loop(TensorDataset(DATA.tensors[0] + epoch), 8):
            model(x).mean().backward()
            optimizer.step()


def counts_before_the_loop(ctx: FragmentContext) -> None:
    made(ctx)
    for epoch in ctx.epochs():
        ctx.state['epoch'] = epoch
        for _ in ctx.loop(DATA, 8):
            pass


def length_of_an_epoch(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.epochs():
        ctx.loop(DATA, 8, epochs=1)


def epochs_twice(ctx: FragmentContext) -> None:
    made(ctx)
    ctx.epochs()
    ctx.epochs()


def loader_without_epochs(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    for _ in ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(DATA))[2]:
        pass


def schedule_outside(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    ctx.prepare(model, optimizer, decay)[2].step()


MISTAKES = {
    epochs_without_a_loop: 'Epoch 0 of ctx.epochs() ended without ctx.loop',
    leaves_a_loop: 'The function left ctx.loop within epoch 0: let ctx.loop end by itself',
    two_loops: 'ctx.loop was called twice within an epoch of ctx.epochs()',
    data_by_epoch: 'ctx.loop was given other data or settings in epoch 1 than before',
    counts_before_the_loop: 'for epoch in ctx.epochs():" and ctx.loop, ctx.state changed',
    length_of_an_epoch: 'ctx.loop was given epochs or samples within ctx.epochs()',
    epochs_twice: 'ctx.epochs must be called once, after ctx.prepare and around',
    loader_without_epochs: 'was iterated over outside of ctx.epochs(): say "for epoch in',
    schedule_outside: 'scheduler.step() was called outside of ctx.loop: call it in the loop',
    evaluates_in_the_body: 'ctx.evaluate was called in the body of ctx.loop',
    needs_gradients: 'computes gradients, such as forces: give gradients=True',
    returns_a_mean: "for 'loss' a Tensor of shape (); for a batch of 2 samples it must be",
    checkpoints_in_the_body: 'ctx.checkpoint was called outside of the end of an epoch',
}


@pytest.mark.parametrize('function', MISTAKES)
def test_a_mistake_gets_a_sentence(function: Callable[..., None]) -> None:
    assert MISTAKES[function] in refused_here(function, total_samples=66, shards=3)


def test_means_are_exact() -> None:
    parts = [(1 / 3, 0.1), (1 / 3, 0.2), (1 / 3, 0.7)]
    assert mean(parts) == mean(parts[::-1])
    assert mean([(0.3, 0.1), (0.7, 0.1)]) == 0.1
    assert mean([(0.5, float('inf')), (0.5, float('-inf'))]) != mean([(1.0, 1.0)])


class Table:
    """A schedule whose state has a tensor."""

    def __init__(self) -> None:
        self.factors = torch.linspace(1, 0.1, 20)

    def __call__(self, epoch: int) -> float:
        return float(self.factors[epoch])


def test_a_scheduler_may_have_a_tensor_in_its_state() -> None:
    def function(ctx: FragmentContext) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, Table())
        prepared: tuple[Any, ...] = ctx.prepare(model, optimizer, decay)
        for _ in ctx.epochs():
            for (x,) in ctx.loop(DATA, 8):
                prepared[1].zero_grad()
                prepared[0](x).mean().backward()
                prepared[1].step()
            prepared[2].step()
        assert prepared[2].get_last_lr() == [pytest.approx(0.1 * Table()(2))]

    assert in_this_process(function, total_epochs=2)[0].samples == 44


def test_an_evaluation_that_is_stopped_leaves_ctx_state_as_it_was_with_its_types() -> None:
    state: dict[Any, Any] = {'count': {0: 1}, 'pair': (1, 2)}

    def function(ctx: FragmentContext) -> None:
        model, optimizer, *_ = made(ctx)

        def is_stopped() -> None:
            ctx.state['pair'] = (3, 4)
            raise EvaluationStopped

        ctx.each_epoch(is_stopped)
        ctx.state.update(copy.deepcopy(state))
        try:
            for (x,) in ctx.loop(DATA, 8):
                model(x).mean().backward()
                optimizer.step()
        except FragmentEnd:
            found.append(ctx.state)
            raise

    found: list[dict[Any, Any]] = []
    with pytest.raises(FragmentEnd):
        in_this_process(function, total_epochs=2, shards=1)
    assert found == [state]


ROWS = TensorDataset(torch.rand(22, 2, generator=torch.Generator().manual_seed(1)))


def by_means(ctx: FragmentContext, at: int, folder: Path) -> None:
    """The learning rate follows the mean of an epoch, as patience does."""
    model, optimizer = small(ctx)

    def end() -> None:
        optimizer.param_groups[0]['lr'] *= 1 - ctx.epoch_means['x']
        if ctx.is_main:
            with (folder / f'means-{at}').open('a') as file:
                file.write(f'{ctx.epoch_means["x"]!r}\n')

    ctx.each_epoch(end)
    for (x,) in ctx.loop(ROWS, 5):
        ctx.report(x=x[:, 0].mean())
        model(x).square().mean().backward()
        optimizer.step()
        cut(ctx, at)


def test_means_over_an_epoch_for_any_cuts(fork_server: ForkClient, tmp_path: Path) -> None:
    options = {'total_samples': None, 'total_epochs': 3}
    assert equal(*whole_and_cut(fork_server, tmp_path, by_means, tmp_path, at=27, **options))
    means = (tmp_path / 'means-0').read_text()
    assert means == (tmp_path / 'means-27').read_text()
    mean = float(ROWS.tensors[0][:, 0].double().mean())
    assert [float(line) for line in means.split()] == pytest.approx([mean] * 3, rel=1e-6)


def counts(ctx: FragmentContext, where: str) -> None:
    model, optimizer = small(ctx)
    ctx.state['n'] = 0
    for (x,) in ctx.loop(ROWS, 6):
        model(x).square().mean().backward()
        optimizer.step()
        if where == 'body' or ctx.is_main:
            ctx.state['n'] += len(x)


def test_a_state_that_differs_by_rank_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    options = {'world_size': 2, 'total_samples': 21, 'shards': 2}
    said = refused(fork_server, tmp_path, counts, 'body', **options)
    assert "ctx.state['n'] is 11 on rank 0 and 10 on rank 1" in said and 'ctx.epoch_means' in said
    with pytest.raises(AssertionError, match=r'\[\]'):  # nothing is refused
        refused(fork_server, tmp_path / 'main', counts, 'main', **options)


def test_each_of_several_loops_looks_at_steps_once() -> None:
    def train(ctx: FragmentContext) -> None:
        model, data = nn.Linear(4, 1), torch.randn(8, 4)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            for x in ctx.loop(data, 4, epochs=1):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
            looks.append(len(_global_optimizer_pre_hooks))

    looks: list[int] = []
    in_this_process(train, total_epochs=3)
    assert len(looks) == 3 and len({*looks}) == 1
