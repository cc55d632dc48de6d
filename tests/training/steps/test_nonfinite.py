"""Gradients that are not finite: nothing spoilt is kept; training goes on as the policy says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import BadInput, FragmentContext, load_weights
from parsl_freetrain.core.model.events import CheckpointSaved
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.mode import (
    MOST_ROLLBACKS,
    MOST_SKIPPED_IN_A_ROW,
    NonFinitePolicy,
    Throughput,
)
from parsl_freetrain.training.steps.nonfinite import Watch, all_finite
from tests.support.examples import in_this_process
from tests.support.ranks import all_finish, order, ranks

TOTAL, BATCH = 240, 8


def turned(ctx: FragmentContext | None) -> Any:
    """Trains a complex model in a fragment, or without one."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(5)).to(torch.complex64)
    if ctx:
        model, optimizer = ctx.prepare(model, optimizer)
    for batch in ctx.loop(x, BATCH, shuffle=False) if ctx else x.split(BATCH):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True) * 1j).abs().pow(2).mean().backward()
        optimizer.step()
    return torch.view_as_real(model.weight.detach()).flatten().tolist() if ctx else model


@pytest.mark.parametrize('mode', ['reproducible', 'throughput'])
def test_complex_numbers(fork_server: ForkClient, tmp_path: Path, mode: str) -> None:
    """They are summed as pairs, with the result of a plain loop; NaN in them is noticed."""
    found: dict[int, list[float]] = {}
    for count in (1, 3):
        ordered = order(tmp_path / str(count), total_samples=48, mode=mode)
        outcome = all_finish(fork_server, ordered, count, tmp_path, turned)[0]
        found[count] = json.loads(outcome.result)
    if mode == 'reproducible':
        assert found[1] == found[3]
    model = turned(None)
    plain = torch.view_as_real(model.weight.detach()).flatten()
    assert torch.allclose(torch.tensor(found[3]), plain, atol=1e-5)
    watch = Watch(Prepared(models=(model,)))
    assert not watch.spoilt()
    torch.nn.init.constant_(model.weight.data.imag, float('nan'))
    assert watch.spoilt() and not all_finite([model.weight.detach()])


def train(
    ctx: FragmentContext,
    bad: tuple[int, ...] = (),
    left_out: tuple[int, ...] = (),
    culprit: int = 0,
    always_from: int = TOTAL,
    pause_s: float = 0.0,
    late: bool = False,
) -> None:
    """Loss 'not a number' on rank ``culprit`` in the batches that begin at ``bad``; no step at all
    in those at ``left_out``. ``late``: gradients are looked at as on a device.
    """
    import time

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.randn(TOTAL, 2, generator=torch.Generator().manual_seed(5))
    if late:
        ctx._run.model.steps._late = True  # type: ignore[union-attr]
    for features in ctx.loop(x, BATCH):
        spoil = (ctx.samples in bad or ctx.samples >= always_from) and ctx.rank == culprit
        optimizer.zero_grad()
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(features * (float('nan') if spoil else 1)).pow(2).mean().backward()
        if ctx.samples in left_out:
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
            for parameter in model.parameters():
                parameter.grad = None
        optimizer.step()
        time.sleep(pause_s)


def run(
    fork_server: ForkClient,
    folder: Path,
    world_size: int,
    *args: Any,
    mode: str,
    on_nan: str = 'stop',
    **options: Any,
) -> list[Any]:
    settings: dict[str, Any] = {'mode': mode, 'on_nan': on_nan, 'shards': 2}
    ordered = order(folder, total_samples=TOTAL, checkpoint_every_s=1e-9, **settings)
    with ranks(fork_server, ordered, world_size, folder, train, *args, **options) as gang:
        outcomes = gang.run()
        assert {outcome.how for outcome in outcomes} <= {'finished', 'error', 'peer-lost'}, outcomes
        for checkpoint in (saved.checkpoint for saved in gang.ranks[0].said(CheckpointSaved)):
            if Path(checkpoint.path).exists():  # older ones are removed
                assert all_finite(load_weights(checkpoint.path).values()), checkpoint
    return outcomes


@pytest.mark.parametrize(
    ('mode', 'world_size', 'how', 'where'),
    [
        ('reproducible', 2, {'late': True}, 'samples from 80 to 88, on rank 1;'),
        ('reproducible', 1, {'bad': (TOTAL - BATCH,)}, f'to {TOTAL}, on rank 0;'),
        ('throughput', 2, {}, r'samples from \d+ to \d+, on rank 1;'),
    ],
)
def test_stop_is_a_sentence_and_the_last_checkpoint_is_good(
    fork_server: ForkClient, tmp_path: Path, mode: str, world_size: int, how: Any, where: str
) -> None:
    given = {'bad': (80,), 'culprit': world_size - 1, 'pause_s': 0.01, **how}
    outcomes = run(fork_server, tmp_path, world_size, mode=mode, **given)
    error = outcomes[0].error
    assert (outcomes[0].how, error.type) == ('error', 'BadInput'), error
    said = f'a gradient was infinite or not a number in training on the .*{where}'
    assert re.search(said, error.message), error.message
    assert "Trainer 'digits', fragment 1" in error.message
    assert '\n' not in error.message
    assert outcomes[0].path is not None


@pytest.mark.parametrize(
    ('mode', 'on_nan', 'world_size'),
    [('reproducible', 'skip', 2), ('throughput', 'skip', 2), ('throughput', 'rollback', 2)],
)
def test_the_result_is_as_if_the_batch_had_not_been_trained(
    fork_server: ForkClient, tmp_path: Path, mode: str, on_nan: str, world_size: int
) -> None:
    first, *_ = run(fork_server, tmp_path / 'clean', world_size, mode=mode, left_out=(80, 160))
    given: dict[str, Any] = {'bad': (80, 160), 'culprit': world_size - 1, 'pause_s': 0.005}
    outcomes = run(fork_server, tmp_path / 'bad', world_size, mode=mode, on_nan=on_nan, **given)
    assert [outcome.how for outcome in outcomes] == ['finished'] * world_size, outcomes
    assert {outcome.samples for outcome in outcomes} == {TOTAL}
    metrics = outcomes[0].metrics
    if mode == 'throughput' and on_nan == 'rollback':
        # 1: both bad batches were trained before it was noticed.
        assert metrics['rollbacks'] in (1, 2)
        # Without a checkpoint in between, the second time goes back before the first bad batch too.
        assert metrics['skipped_steps'] in ((2,) if metrics['rollbacks'] == 1 else (2, 3))
    else:
        assert metrics['skipped_steps'] == 2
        assert 'rollbacks' not in metrics
    clean, trained = load_weights(first.path), load_weights(outcomes[0].path)
    for name, tensor in clean.items():
        if mode == 'reproducible':
            assert torch.equal(trained[name], tensor), name
        else:
            torch.testing.assert_close(trained[name], tensor)


@pytest.mark.parametrize(('on_nan', 'mode'), [('rollback', 'throughput'), ('skip', 'reproducible')])
def test_what_stays_not_finite_ends(
    fork_server: ForkClient, tmp_path: Path, on_nan: str, mode: str
) -> None:
    outcomes = run(fork_server, tmp_path, 2, mode=mode, on_nan=on_nan, always_from=40)
    assert outcomes[0].error.type == 'BadInput', outcomes
    assert 'lower the learning rate' in outcomes[0].error.message


class Counts:
    """What ``ctx.keep`` keeps."""

    def __init__(self) -> None:
        self.times = 0

    def state_dict(self) -> dict[str, int]:
        return {'times': self.times}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.times = state['times']


def spoilt_once(ctx: Any) -> list[int]:
    """Counts batches by variables, enumerate, an object, a setting and a buffer, in two loops."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.0))
    model.register_buffer('seen', torch.zeros(()), persistent=False)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    kept, count, places, last = ctx.keep(Counts()), 0, [], 0
    data = TensorDataset(torch.ones(8 * BATCH, 2))
    for bad, how in ((2, {'samples': 8 * BATCH}), (12, {})):
        for number, (x,) in enumerate(ctx.loop(data, BATCH, **how)):
            last, count, kept.times = number, count + 1, kept.times + 1
            places.append(ctx.samples)
            model[1].p += 1e-3
            model.seen += 1
            (model(x).mean() * (float('nan') if ctx.samples == bad * BATCH else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    in_order = places == list(range(0, 16 * BATCH, BATCH))
    figures = [last + 1, count, kept.times, round(1e3 * model[1].p), 2 + int(model.seen)]
    return [*figures, in_order]


def test_variables_go_back_with_the_models() -> None:
    """To where each of two loops began, as there was no later checkpoint yet."""
    mode = Throughput(on_nan='rollback')
    checkpoint, _ = in_this_process(spoilt_once, mode=mode, total_samples=16 * BATCH)
    assert checkpoint.metrics['rollbacks'] == 2
    # A step that is skipped has no buffers.
    assert checkpoint.result == [8, 16, 16, 16, 16, True]


def test_rollbacks_are_bounded() -> None:
    policy = NonFinitePolicy('rollback', 'Trainer t')
    policy.go_back(0, 80, MOST_ROLLBACKS - 1, '/c')
    assert policy.looks_at_every_step(79)
    assert not policy.looks_at_every_step(80)
    with pytest.raises(BadInput, match=f'went back to a checkpoint {MOST_ROLLBACKS} times'):
        policy.go_back(80, 160, MOST_ROLLBACKS, '/c')
    with pytest.raises(BadInput, match='samples from 80 to 160'):
        policy.go_back(80, 160, 0, '')


def test_a_good_step_between_resets_the_count() -> None:
    policy = NonFinitePolicy('skip', 'Trainer t')
    for _ in range(3):
        for i in range(MOST_SKIPPED_IN_A_ROW):
            policy.kept_back(i, i + 1, '')
        policy.went_well()
    for i in range(MOST_SKIPPED_IN_A_ROW):
        policy.kept_back(i, i + 1, '')
    with pytest.raises(BadInput, match='in a row were not finite'):
        policy.kept_back(8, 9, '')


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_finite(dtype: torch.dtype) -> None:
    rest = [None, torch.tensor([1, 2]), torch.ones(3, dtype=torch.float16)]
    nan, inf = float('nan'), float('inf')
    for values in ([1.0, 2.0], [3e38, 3e38], []):
        assert all_finite([*rest, torch.tensor(values, dtype=dtype)])
    for values in ([1.0, nan], [inf, 0.0]):
        assert not all_finite([*rest, torch.tensor(values, dtype=dtype)])


def test_masks_with_infinities_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer('mask', torch.tensor([0.0, float('-inf')]))
    watch = Watch(Prepared((model,)))
    assert not watch.spoilt()
    with torch.no_grad():
        model.bias[0] = float('nan')
    assert watch.spoilt()
