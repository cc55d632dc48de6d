"""Modes and policies as their user asks for them: from the decorator to the ranks."""

import json
from pathlib import Path

import pytest

from parsl_freetrain import BadInput, FragmentContext, LocalSite, Scaled, freetrain_app
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S


def train(ctx: FragmentContext, nan_at: int | None = None) -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []
    for x in ctx.loop(torch.randn(40, 2), 4):
        sizes.append(len(x) * ctx.world_size)
        optimizer.zero_grad()
        (model(x).mean() * (float('nan') if ctx.samples == nan_at else 1.0)).backward()
        optimizer.step()
    ctx.report(batch=sizes[0])


def test_scaled_mode_and_policy_reach_the_ranks_and_the_folder_remembers(tmp_path: Path) -> None:
    """And without that policy a loss that is not a number fails its trainer with a sentence."""
    scaled = Scaled(lr='sqrt', combine='mean', on_nan='skip')
    with freetrain(tmp_path, LocalSite(nodes=2)):
        future = freetrain_app(min_nodes=2, max_nodes=2, total_epochs=1, mode=scaled)(train)(
            nan_at=8
        )
        metrics = future.result(timeout=LIMIT_S).metrics
        stops = freetrain_app(max_nodes=1, total_epochs=1)(train)(nan_at=8, trainer_name='stops')
        with pytest.raises(
            BadInput,
            match='a gradient was infinite or not a number in training on the samples from 8 '
            'to 12, on rank 0',
        ):
            stops.result(timeout=LIMIT_S)
    assert metrics == {'batch': 8.0, 'skipped_steps': 1.0}
    identity = json.loads((tmp_path / 'checkpoints' / 'train' / 'trainer.json').read_text())[
        'identity'
    ]
    del identity['function']
    assert identity == {
        'mode': 'scaled',
        'seed': 0,
        'reference_ranks': 1,
        'lr': 'sqrt',
        'warmup_samples': 0,
        'combine': 'mean',
    }
    with freetrain(tmp_path, LocalSite(nodes=1)), pytest.raises(BadInput, match='lr'):
        freetrain_app(total_epochs=2, mode=Scaled())(train)()
