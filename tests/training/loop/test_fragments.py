"""Fragments of real ranks: the same result for any cuts, and a good end whatever happens."""

import os
import resource
import select
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from parsl_freetrain import FragmentContext, Retention
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.training.checkpoint.flatten import same
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec import messages as msg
from tests.support.ranks import all_finish, ended, order, ranks
from tests.support.waiting import slowness, under_load

SIZE, BATCH = 37, 10
TOTAL = 4 * SIZE


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random images with augmentation."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(SIZE, 1, 6, 6, generator=generator)
        self.labels = torch.randint(0, 3, (SIZE,), generator=generator)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index] + 0.1 * torch.randn(1, 6, 6), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, 3),
    )


def train(
    ctx: FragmentContext,
    *,
    stop_at: int | None = None,
    kill: tuple[int, int] | None = None,
    num_workers: int = 0,
) -> None:
    """Asks itself to stop at ``stop_at`` samples; kills rank ``kill[0]`` at ``kill[1]`` samples."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=0.2)
    model, optimizer, steps, plateau = ctx.prepare(
        model, optimizer, steps, plateau, clip_grad_norm=0.1
    )
    for images, labels in ctx.loop(Images(), BATCH, num_workers=num_workers):
        if kill is not None and kill[0] == ctx.rank and ctx.samples >= kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if stop_at is not None and ctx.samples >= stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        steps.step()
        if ctx.spec.shards:  # in other modes each rank has a loss of its own
            plateau.step(loss.item())
        ctx.report(loss=loss.item())
    ctx.report(accuracy=0.5)


def final_state(folder: Path) -> dict[str, Any]:
    checkpoint = PosixCheckpointStore(folder / 'store', 'digits').latest()
    assert checkpoint is not None
    saved = read_state(checkpoint.path)
    return {
        'samples': checkpoint.samples,
        'model': saved.models[0],
        'optimizer': saved.optimizers,
        'scheduler': saved.schedulers,
    }


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp('undisturbed')
    all_finish(fork_server, order(folder, total_samples=TOTAL), 1, folder, train)
    return final_state(folder)


# (world size, what happens)
CUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {'stop_at': 20}),
    (3, {'stop_at': 57}),
    (2, {'kill': (1, 67)}),
    (4, {'kill': (0, 84)}),
    (5, {}),
]


def test_cuts_kills_and_world_sizes_do_not_change_a_bit(
    fork_server: ForkClient, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    hows = []
    for fragment, (world_size, happens) in enumerate(CUTS, 1):
        ordered = order(tmp_path, fragment, total_samples=TOTAL, checkpoint_every_s=1e-9)
        with ranks(fork_server, ordered, world_size, tmp_path, train, **happens) as gang:
            hows.append({outcome.how or 'killed' for outcome in gang.run()})
            others = [rank.log.read_text() for rank in gang.ranks[1:]]
            assert all(', and 0 were read' in log for log in others if 'Going on' in log)
    stopped, killed = {'stopped'}, {'killed', 'peer-lost'}
    assert hows == [stopped, stopped, killed, killed, {'finished'}]
    assert same(final_state(tmp_path), undisturbed)


def data_workers(pid: int) -> list[int]:
    return [int(child) for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]


def test_a_notice_to_all_processes_of_a_node_ends_no_data_worker(
    fork_server: ForkClient, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """Slurm sends its notice to every process of a job's step. Workers augment alike."""
    total = order(tmp_path, total_samples=TOTAL)

    def notified(ctx: FragmentContext) -> None:
        def notify() -> None:
            if ctx.samples == 2 * BATCH and ctx.fragment == 1:
                for pid in (*data_workers(os.getpid()), os.getpid()):
                    for notice in (signal.SIGUSR1, signal.SIGTERM):
                        os.kill(pid, notice)

        ctx.after_step(notify)
        train(ctx, num_workers=2)

    (outcome,) = ended(fork_server, total, 1, tmp_path, notified)
    assert outcome.how == 'stopped'
    all_finish(fork_server, replace(total, fragment=2), 1, tmp_path, notified)
    assert same(final_state(tmp_path), undisturbed)


def test_a_dead_data_worker_is_a_dead_rank(fork_server: ForkClient, tmp_path: Path) -> None:
    def bereft(ctx: FragmentContext) -> None:
        def kill() -> None:
            if ctx.samples == 2 * BATCH:
                os.kill(data_workers(os.getpid())[0], signal.SIGKILL)

        ctx.after_step(kill)
        train(ctx, num_workers=2)

    (outcome,) = ended(fork_server, order(tmp_path, total_samples=TOTAL), 1, tmp_path, bereft)
    assert outcome.how == 'peer-lost'
    assert 'DataLoader worker (pid' in outcome.error.message


def test_a_killed_rank_leaves_no_data_workers(fork_server: ForkClient, tmp_path: Path) -> None:
    endless = order(tmp_path, total_samples=10_000_000)
    with ranks(fork_server, endless, 1, tmp_path, train, num_workers=2) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(ev.FragmentProgressed)))
        workers = data_workers(gang.ranks[0].process.pid)
        pidfds = [os.pidfd_open(worker) for worker in workers]
        gang.ranks[0].process.kill()
        assert len(workers) == 2
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], 30)[0]
            os.close(pidfd)


def test_a_killed_rank_is_noticed_at_once(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=100_000, mode='throughput')
    with ranks(fork_server, ordered, 3, tmp_path, train, kill=(1, 50)) as gang:
        gang.hear(lambda: gang.ranks[1].status is not None)
        began = time.monotonic()
        outcomes = gang.run()
    assert gang.ranks[1].status == -signal.SIGKILL
    assert [outcome.how for outcome in outcomes] == ['peer-lost', None, 'peer-lost']
    assert time.monotonic() - began < under_load(7.0)


def test_a_stop_request_ends_all_at_the_same_step(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=10_000_000, mode='throughput')
    with ranks(fork_server, ordered, 3, tmp_path, train) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(ev.FragmentProgressed)))
        gang.ranks[2].process.send(msg.StopTraining('others need the node'))
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'stopped'}
    checkpoint = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
    assert checkpoint is not None
    assert checkpoint.samples > 0
    assert {outcome.samples for outcome in outcomes} == {checkpoint.samples}
    said = gang.ranks[0].said(ev.CheckpointSaved)[-1].checkpoint
    assert outcomes[0].path == checkpoint.path == said.path


def test_the_speed_is_without_the_slow_first_step(fork_server: ForkClient, tmp_path: Path) -> None:
    """As it was, each fragment began with a speed that made the controller rescale it at once."""

    def slow_at_first(ctx: FragmentContext) -> None:
        ctx.after_step(lambda: time.sleep(2.0 if ctx.samples <= BATCH else 0.1))
        train(ctx)

    with ranks(
        fork_server, order(tmp_path, total_samples=TOTAL), 1, tmp_path, slow_at_first
    ) as gang:
        gang.run()
    (began,) = gang.ranks[0].said(ev.FragmentStarted)
    first, *others = gang.ranks[0].said(ev.FragmentProgressed)
    assert first.rate is None and others
    for one in others:
        assert one.rate and one.rate > one.samples / (one.at - began.at)


def test_the_deadline_is_kept(fork_server: ForkClient, tmp_path: Path) -> None:
    deadline, clock = time.monotonic() + 4.0, time.time() + 4.0
    ordered = order(tmp_path, total_samples=10_000_000, mode='throughput', deadline=deadline)
    with ranks(fork_server, ordered, 2, tmp_path, train) as gang:
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'stopped'}
    saved = gang.ranks[0].said(ev.CheckpointSaved)[-1].checkpoint
    assert saved.samples == outcomes[0].samples
    assert saved.at < clock + 0.05 * (slowness() - 1)  # a little later on a busy machine


def faulty(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(TensorDataset(torch.randn(8, 2)), 4):
        print('about to fail')
        raise ZeroDivisionError(f'no {tuple(x.shape)}')


def test_an_exception_arrives_with_its_traceback(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, order(tmp_path), 1, tmp_path, faulty) as gang:
        (outcome,) = gang.run()
    error = outcome.error
    assert (outcome.how, error.type, error.message) == ('error', 'ZeroDivisionError', 'no (1, 2)')
    assert "raise ZeroDivisionError(f'no {tuple(x.shape)}')" in error.traceback
    assert 'rank.py' not in error.traceback
    exception, trace = cloudpickle.loads(error.exception)
    assert isinstance(exception, ZeroDivisionError)
    assert trace['tb_frame']['f_code']['co_name'] == 'faulty'
    log = gang.ranks[0].log
    assert 'about to fail' in log.read_text()
    assert 'ZeroDivisionError' in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_later_fragment_fences_this_one(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, 3, total_samples=10_000_000)
    with ranks(fork_server, ordered, 2, tmp_path, train) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(ev.FragmentProgressed)))
        PosixCheckpointStore(tmp_path / 'store', 'digits').fence(4)
        gang.ranks[0].process.send(msg.StopTraining('test'))
        assert [outcome.how for outcome in gang.run()] == ['fenced', 'peer-lost']
    assert PosixCheckpointStore(tmp_path / 'store', 'digits').latest() is None


def closing(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(TensorDataset(torch.randn(8, 2)), 4):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    if ctx.is_main:
        ctx.report(accuracy=0.75)


def test_epochs_metrics_and_messages(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=None, total_epochs=1.5)
    with ranks(fork_server, ordered, 2, tmp_path, closing) as gang:
        outcomes = gang.run()
    first, second = gang.ranks
    assert [message.total_samples for message in first.said(ev.TotalKnown)] == [12]
    assert second.said(ev.TotalKnown) == []
    (started,) = first.said(ev.FragmentStarted)
    assert started.samples == 0
    assert started.at >= gang.launched_at
    (saved,) = (said.checkpoint for said in first.said(ev.CheckpointSaved))
    assert (saved.samples, saved.metrics) == (12, {'accuracy': 0.75})
    assert (outcomes[0].how, outcomes[0].samples) == ('finished', 12)
    assert outcomes[0].metrics == {'accuracy': 0.75}
    assert first.messages[-1] == second.messages[-1] == msg.Exit(0)
    latest = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
    assert latest is not None
    assert latest.metrics == {'accuracy': 0.75}
    assert latest.path == outcomes[0].path


def without_room(ctx: FragmentContext) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    raise ZeroDivisionError('no room')


def test_an_error_arrives_if_the_log_cannot_grow(fork_server: ForkClient, tmp_path: Path) -> None:
    (outcome,) = ended(fork_server, order(tmp_path), 1, tmp_path, without_room)
    assert (outcome.how, outcome.error.message) == ('error', 'no room')


def test_periodic_checkpoints_are_pruned(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=80, checkpoint_every_s=1e-9, keep=Retention(2))
    with ranks(fork_server, ordered, 2, tmp_path, closing) as gang:
        gang.run()
    said = [message.checkpoint for message in gang.ranks[0].said(ev.CheckpointSaved)]
    samples = [message.samples for message in said]
    # While one is being written training goes on; the last one waits for it.
    assert samples == sorted(samples) and samples[-1] == 80 and len(samples) > 1
    assert all(message.pause_s >= 0 for message in said)
    kept = PosixCheckpointStore(tmp_path / 'store', 'digits').checkpoints()
    assert [checkpoint.samples for checkpoint in kept] == samples[-2:]


def test_a_deleted_folder_is_not_begun_anew(fork_server: ForkClient, tmp_path: Path) -> None:
    """Its fragment knows that there was a checkpoint."""
    (outcome,) = ended(fork_server, order(tmp_path, 5, samples=40), 1, tmp_path, closing)
    assert outcome.how == 'error'
    assert 'with a checkpoint at 40 samples, was deleted or moved' in outcome.error.message
    assert not (tmp_path / 'store').exists()


def test_a_step_uses_memory_of_the_step_before(fork_server: ForkClient, tmp_path: Path) -> None:
    """Each page costs about a microsecond: more than half of the time of small models."""

    def train(ctx: FragmentContext) -> None:
        import resource

        from tests.support.ranks import finish

        def pages(rounds: int) -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(rounds):
                gradients = [torch.ones(2**19) for _ in range(8)]  # 2 MB each
                del gradients
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        pages(2)
        asked = pages(10)
        finish(ctx)
        ctx.report(asked=asked)

    (outcome,) = all_finish(fork_server, order(tmp_path, total_samples=4), 1, tmp_path, train)
    assert outcome.metrics['asked'] < 8 * 2**19 * 4 / 4096  # of 80 tensors, that of eight
