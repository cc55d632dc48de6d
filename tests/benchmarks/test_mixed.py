"""A trainer on a fast and a slow node at once, live; ``make bench BENCH_ARGS='-k mixed'``."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from tests.benchmarks.workload import MACHINE, data, network, optimizer_of
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S

SAMPLE_S, BATCH, BATCHES, ROUNDS = 0.01, 48, 20, 2
CLASSES = {'slot00': 'fast', 'slot01': 'slow'}
RATES = {'fast': {1: 1.0, 2: 2.0}, 'slow': {1: 0.5, 2: 1.0}}


def workload(ctx: ft.FragmentContext) -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = optimizer_of(model)
    model, optimizer = ctx.prepare(model, optimizer)
    began, first, seen = 0.0, ctx.samples, 0
    for x, y in ctx.loop(TensorDataset(*data()), batch_size=BATCH):
        if not began and ctx.samples > first:  # the first batch warms up
            began, seen = time.monotonic(), ctx.samples
        time.sleep(SAMPLE_S * len(x))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    ctx.report(rate=(ctx.samples - seen) / (time.monotonic() - began))


@pytest.mark.timeout(900)
@pytest.mark.parametrize('shards', [6, 12])
def test_mixed_classes(tmp_path: Path, shards: int) -> None:
    site = ft.LocalSite(2, node_classes=CLASSES, class_speeds={'slow': 0.5})
    found: dict[str, list[float]] = {}
    results = []
    with freetrain(tmp_path, site):
        for i in range(ROUNDS):
            alone = ('fast', ['fast'], 1), ('slow', ['slow'], 1)
            for name, classes, nodes in (*alone, ('both', RATES, 2)):
                scaling = ft.Scaling(class_rates={c: RATES[c] for c in classes}, mixed=nodes > 1)
                train = ft.freetrain_app(
                    min_nodes=nodes,
                    max_nodes=nodes,
                    total_samples=BATCH * BATCHES,
                    mode=ft.Reproducible(shards=shards),
                    scaling=scaling,
                )(workload)
                results.append(train(trainer_name=f'{name}-{i}').result(LIMIT_S))
                found.setdefault(name, []).append(results[-1].metrics['rate'])
    fast, slow, both = (median(found[name]) for name in ('fast', 'slow', 'both'))
    assert all(ft.same_weights(result, results[0]) for result in results)
    print(
        f'\nSamples/s, {shards} shards ({MACHINE}): fast {fast:.1f}, slow {slow:.1f} '
        f'({slow / fast:.3f}), both {both:.1f}: {both / fast:.3f} of the fast one alone, '
        f'{both / (fast + slow):.3f} of the sum; the same bits'
    )
