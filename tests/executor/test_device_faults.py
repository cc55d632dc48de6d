"""A node with a broken device is a preemption, and is avoided. The same fault on three nodes is the
function's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parsl_freetrain import FragmentContext, LocalSite, freetrain_app
from parsl_freetrain.ledger.reader import Reader
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S

FAULT = 'CUDA error: uncorrectable ECC error encountered'


def train(ctx: FragmentContext) -> None:
    model = torch.nn.Linear(2, 1)
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in ctx.loop(torch.ones(8, 2), 4):
        raise torch.AcceleratorError(f'{FAULT}\nCompile with TORCH_USE_CUDA_DSA')


def test_a_broken_device_is_a_preemption_and_its_node_is_avoided(tmp_path: Path) -> None:
    with freetrain(tmp_path, LocalSite(nodes=3, poll_s=0.2)) as executor:
        future = freetrain_app(max_nodes=1, total_epochs=2)(train)()
        with pytest.raises(torch.AcceleratorError, match=FAULT) as raised:
            future.result(LIMIT_S)
    with Reader(executor.ledger_path) as ledger:
        fragments = ledger.story().fragments
    assert [fragment.ending for fragment in fragments] == ['preempted', 'preempted', 'failed']
    assert f' has a broken device: {FAULT};' in (fragments[0].error or '')
    assert any(f'{FAULT} (on 3 nodes: ' in note for note in raised.value.__notes__)
