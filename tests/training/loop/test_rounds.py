"""Rounds of pieces, trained by real ranks: the same bits whatever happens to the pieces."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import DiLoCo, Folder, FragmentContext, Nesterov
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.host.files import write_new
from parsl_freetrain.testing import Fault, kill_at, with_faults
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.diloco import replica_folder, replica_name
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from tests.support.ranks import KILLED, order, ranks

BATCH, STEPS, ROUNDS = 16, 2, 3
TOTAL = BATCH * STEPS * ROUNDS
STAGES = ['begin', 'written', 'manifest', 'before-commit', 'committed', 'outer-begin',
          'outer-written', 'outer-manifest', 'outer-before-commit', 'outer-committed']  # fmt: skip
DILOCO = DiLoCo(replicas=2, steps=STEPS, outer=Nesterov(lr=0.7, momentum=0.9))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.outside = nn.Linear(4, 4)
        self.outside.weight = self.inside.weight
        self.frozen = nn.Linear(4, 2**14).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.outside(nn.functional.dropout(self.norm(self.inside(x)), 0.2, self.training))


def train(ctx: FragmentContext, by_epochs: bool = False, leaves: bool = False, **how: Any) -> float:
    model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(trained, lr=0.05))
    assert ctx._run.state.round_from  # which a rank that survives may have to leave
    average: Any = ctx.ema(model, 0.5)
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x**2)
    seen = []

    def end_epoch() -> None:
        ctx.state.setdefault('sums', []).append(float(average.inside.weight.double().sum()))
        ctx.checkpoint(best=ctx.state['sums'][-1])

    def loop() -> None:
        for features, target in ctx.loop(data, BATCH, **{'drop_last': True, **how}):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(features), target)
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss.item())
            seen.append(loss.item())

    if by_epochs:
        for _ in ctx.epochs():
            loop()
            end_epoch()
            if leaves:
                break
    else:
        ctx.each_epoch(end_epoch)
        loop()
    assert seen
    return float(model.inside.weight.detach().double().sum() + sum(ctx.state['sums']))


def train_by_epochs(ctx: FragmentContext) -> float:
    return train(ctx, by_epochs=True)


def piece(folder: Path, replica: int, fragment: int, **changes: Any) -> FragmentOrder:
    """With ``diloco.transport``, replica 1 is at another site, which has a folder of its own."""
    own = {'total_samples': TOTAL, 'checkpoint_every_s': 1e-9, **changes}
    diloco = own.pop('diloco', DILOCO)
    folder = folder / 'there' if diloco.transport and replica else folder
    whole = order(folder, fragment, **own)
    return replace(
        whole,
        trainer=replica_name('digits', replica),
        store=str(replica_folder(folder / 'store', replica)),
        spec=structs.replace(whole.spec, diloco=diloco, replica=replica),
    )


def run(server: ForkClient, ordered: FragmentOrder, size: int = 1, function: Any = train) -> Any:
    """Its first rank's outcome."""
    with ranks(server, ordered, size, Path(ordered.store), function) as gang:
        return gang.run()[0]


def final(folder: Path) -> Any:
    checkpoint = PosixCheckpointStore(folder / 'store', 'digits').latest()
    assert checkpoint is not None
    saved = read_state(checkpoint.path)
    assert saved.position.finished
    assert torch.equal(saved.models[0]['inside.weight'], saved.models[0]['outside.weight'])
    return saved


def killed(stage: str, function: Any = train) -> Any:
    strike = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    begun = 0 if stage.startswith('outer') else 1
    return with_faults(function, Fault(None, None, strike, stage=stage, checkpoint=begun))


@contextmanager
def hidden(folder: Path, own: Path) -> Iterator[None]:
    """Without the folder of another site, if ``own`` is not in it."""
    away = folder.with_name('hidden')
    if apart := folder.is_dir() and folder not in own.parents:
        folder.rename(away)
    yield
    if apart:
        assert not folder.exists()
        away.rename(folder)


def finish(
    server: ForkClient,
    folder: Path,
    size: int = 1,
    faults: Random | None = None,
    trained: Any = train,
    before: Callable[[list[int]], None] = lambda samples: None,
    **changes: Any,
) -> tuple[Any, int]:
    """Train all pieces in an allowed order; the last outcome, and how many were killed."""
    overlap, total = changes.get('diloco', DILOCO).overlap, changes.get('total_samples', TOTAL)
    samples, fragments, kills, length = [0, 0], [0, 0], 0, STEPS * BATCH
    handed_in: dict[tuple[int, int], str] = {}
    while True:
        ahead = [one // length - min(samples) // length for one in samples]
        before(samples)
        may = [k for k in (0, 1) if ahead[k] <= overlap * (samples[k] < total)]
        replica = 0 if samples == [total, total] else (faults.choice(may) if faults else may[-1])
        function = trained
        if faults is not None:
            size = faults.randint(1, 2)
            at = samples[replica] // BATCH + faults.randint(0, 1)
            where = kill_at(faults.randrange(size), at, fragment=None)
            strikes = [killed(stage, trained) for stage in faults.sample(STAGES, 3)]
            function = faults.choice([trained, with_faults(trained, where), *strikes])
        fragments[replica] += 1
        told = tuple((*of, where) for of, where in handed_in.items())
        ordered = piece(folder, replica, fragments[replica], handed_in=told, **changes)
        with hidden(folder / 'store' if replica else folder / 'there', Path(ordered.store)):
            outcome = run(server, ordered, size, function)
        assert outcome.how != 'error', outcome.error.message
        kills += outcome.how in (None, 'peer-lost')
        store = PosixCheckpointStore(Path(ordered.store), ordered.trainer)
        newest = store.newest()
        handed_in |= {(replica, at): where for at, where in store.handed_in().items()}
        samples[replica] = newest.samples if newest is not None else 0
        if outcome.how == 'finished' and not replica:
            return outcome, kills


def test_kills_and_zombies_change_no_bit(fork_server: ForkClient, tmp_path: Path) -> None:
    expected, _ = finish(fork_server, tmp_path / 'calm', trained=train_by_epochs)
    folder = tmp_path / 'holes'
    fences = folder / 'store' / 'fences'
    overtake = partial(write_new, fences / '000006', b'')
    overtaken = Fault(None, None, overtake, stage='outer-written', checkpoint=0)
    # replica, fragment, number of ranks, what is run, how it ends
    for replica, fragment, size, function, how in (
        (1, 1, 2, with_faults(train, kill_at(0, 1)), KILLED.how),
        (1, 2, 1, train, 'stopped'),
        (0, 1, 2, killed('before-commit'), KILLED.how),
        (0, 2, 1, with_faults(train, kill_at(0, 1, fragment=None)), KILLED.how),
        (0, 1, 1, train, 'fenced'),  # a zombie of the same piece
        (0, 3, 1, train, 'stopped'),
        (0, 4, 1, killed('outer-written'), KILLED.how),
        (0, 5, 1, with_faults(train, overtaken), 'fenced'),  # in the outer step
        (1, 4, 2, killed('outer-before-commit'), KILLED.how),
        (1, 5, 1, killed('outer-committed'), KILLED.how),
        (0, 6, 3, train, 'stopped'),
        (1, 6, 1, train, 'stopped'),
        (0, 7, 1, train, 'stopped'),
        (1, 7, 1, train, 'finished'),
        (0, 8, 1, train, 'finished'),
    ):
        outcome = run(fork_server, piece(folder, replica, fragment), size, function)
        assert outcome.how == how, (replica, fragment, outcome)
    assert outcome.result == expected.result
    calm, holes = final(tmp_path / 'calm'), final(folder)
    for name, tensor in calm.models[0].items():
        assert torch.equal(tensor, holes.models[0][name]), name


def test_sites_without_a_common_folder_train_the_same_bits(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    """Through kills at random; test_handed_in.py has other transports."""
    diloco = structs.replace(DILOCO, compress='int8')
    calm, _ = finish(fork_server, tmp_path / 'calm', diloco=diloco)
    exchange = tmp_path / 'exchange'
    how: Any = {'diloco': structs.replace(diloco, transport=Folder(str(exchange))), 'keep': 1}
    outcome, kills = finish(fork_server, tmp_path / 'apart', 1, Random(5), **how)
    assert kills and outcome.result == calm.result
    for name, tensor in final(tmp_path / 'calm').models[0].items():
        assert torch.equal(tensor, final(tmp_path / 'apart').models[0][name]), name
    # Of the first replica, which has saved last, the last two rounds are left.
    left = {file.name.split('-')[2] for file in exchange.glob('digits-*')}
    assert left == {str(TOTAL), str(TOTAL - STEPS * BATCH)}


@pytest.mark.long
def test_other_settings_and_one_replica(fork_server: ForkClient, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {'mode': 'throughput', 'size': 2, 'checkpoint_every_s': 3600.0},
        {'diloco': structs.replace(DILOCO, outer=None)},
        {'diloco': structs.replace(DILOCO, overlap=1), 'keep': 1},
        {'diloco': structs.replace(DILOCO, overlap=1, compress='int8'), 'keep': 1},
        {'diloco': structs.replace(DILOCO, compress='bfloat16')},
    ]
    two: Any = {'total_samples': 2 * STEPS * BATCH}  # rounds
    each = [finish(fork_server, tmp_path / str(i), **two, **how)[0] for i, how in enumerate(others)]
    assert len({outcome.result for outcome in each}) == len(others)
    struck, kills = finish(fork_server, tmp_path / 'struck', 1, Random(2), **two, **others[2])
    assert kills and struck.result == each[2].result
    for file in (tmp_path / '0' / 'store' / 'outer').rglob('*.safetensors'):
        assert file.stat().st_size < 2**19  # what is frozen is in the moving average only
    alone = structs.replace(DILOCO, replicas=1)
    pieces = [piece(tmp_path / 'one', 0, n, diloco=alone) for n in range(1, ROUNDS + 2)]
    hows = [run(fork_server, one).how for one in pieces]
    assert hows == ['stopped'] * ROUNDS + ['finished']


def test_a_damaged_end_is_trained_once_more(fork_server: ForkClient, tmp_path: Path) -> None:
    for replica in (0, 1):
        run(fork_server, piece(tmp_path, replica, 1))
    newest = PosixCheckpointStore(tmp_path / 'store', 'digits').newest()
    assert newest is not None
    data = Path(newest.path, 'rank-0.safetensors')
    data.write_bytes(data.read_bytes()[:-1] + b'\0')
    assert run(fork_server, piece(tmp_path, 1, 2)).how == 'stopped'
    for replica, fragment, samples in ((0, 2, 32), (1, 3, 64), (0, 3, 64)):
        outcome = run(fork_server, piece(tmp_path, replica, fragment))
        assert (outcome.how, outcome.samples) == ('stopped', samples)


def test_damaged_weights_are_made_anew(fork_server: ForkClient, tmp_path: Path) -> None:
    for replica in (0, 1):
        run(fork_server, piece(tmp_path, replica, 1))
    end = tmp_path / 'store' / 'ckpt-000000000032-f000001'
    shutil.copytree(end, tmp_path / 'end')
    run(fork_server, piece(tmp_path, 0, 2))  # which may remove it, if it saves more

    def damage() -> None:
        (data,) = (tmp_path / 'store' / 'outer').glob('ckpt-000000000032-*/*.safetensors')
        data.write_bytes(data.read_bytes()[:-1] + b'\x55')

    damage()
    assert run(fork_server, piece(tmp_path, 1, 2)).how == 'peer-lost'
    shutil.rmtree(end, ignore_errors=True)
    outcome = run(fork_server, piece(tmp_path, 1, 3))
    assert 'and replicas have gone on, so' in outcome.error.message
    shutil.copytree(tmp_path / 'end', end)
    assert run(fork_server, piece(tmp_path, 1, 4)).how == 'stopped'


def test_what_replicas_cannot_do_is_said(fork_server: ForkClient, tmp_path: Path) -> None:
    leave = lambda ctx: train(ctx, by_epochs=True, leaves=True)  # noqa: E731
    cannot: list[tuple[dict[str, Any], Any, str]] = [
        ({'total_samples': 80}, train, 'no whole number of rounds of 2 steps with 16 samples'),
        ({'diloco': structs.replace(DILOCO, replicas=3)}, train, '3 replicas cannot share evenly'),
        ({'per_node': 9, 'shards': 9}, train, 'trains 8 samples of each'),
        ({}, lambda ctx: ctx.finish_early('enough'), 'ctx.finish_early is not possible'),
        (
            {},
            lambda ctx: train(ctx, samples=32),
            'A second ctx.loop is not possible with mode=DiLoCo(...): train in one',
        ),
        (
            {},
            lambda ctx: train(ctx, drop_last=False),
            'ends with a short batch of 8, and rounds have full',
        ),
        (
            {'diloco': structs.replace(DILOCO, steps=3)},
            leave,
            'Leaving ctx.epochs() is not possible',
        ),
    ]
    for number, (changes, function, sentence) in enumerate(cannot):
        ordered = piece(tmp_path / str(number), 0, 1, **changes)
        assert sentence in run(fork_server, ordered, 1, function).error.message


def test_another_beginning_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, piece(tmp_path, 0, 1), 1, tmp_path / 'logs', train) as gang:
        gang.run()
        assert [told.round_samples for told in gang.ranks[0].said(ev.RoundKnown)] == [32]

    def other(ctx: FragmentContext) -> None:
        torch.manual_seed(99)
        train(ctx)

    outcome = run(fork_server, piece(tmp_path, 1, 1), 1, other)
    assert "begins with another 'model.inside.weight'" in outcome.error.message
