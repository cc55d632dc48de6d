"""A node with a broken device is a preemption, and is avoided; the same fault on three nodes is the
function's. Devices are told of by a module that torch loads, two on each of three nodes.
"""

import json
from pathlib import Path

import pytest
import torch

from parsl_freetrain import FragmentContext, LocalSite, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.support import template
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S

FAULT = 'CUDA error: uncorrectable ECC error encountered'
PARTS = tuple(f'MIG-{letter}' for letter in 'abcdef')
DEVICES = """
import os
import torch

def install():
    zeros = torch.zeros
    torch.zeros = lambda *size, device=None, **how: None if device else zeros(*size, **how)
    torch.accelerator.current_accelerator = lambda: torch.device('cuda')
    torch.accelerator.device_count = lambda: len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))
    torch.accelerator.set_device_index = lambda index: None
"""


@pytest.fixture
def two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here have six devices, as far as torch says."""
    folder = tmp_path / 'devices'
    about = folder / 'two_devices-1.dist-info'
    about.mkdir(parents=True)
    (folder / 'two_devices.py').write_text(DEVICES)
    (about / 'METADATA').write_text('Metadata-Version: 2.1\nName: two-devices\nVersion: 1\n')
    (about / 'entry_points.txt').write_text('[torch.backends]\ntwo = two_devices:install\n')
    template.name()  # the session's template is started without them
    monkeypatch.setenv('PYTHONPATH', str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', ','.join(PARTS))
    # No fork of a process that has imported torch before may serve here.
    monkeypatch.setenv('TORCH_DEVICE_BACKEND_AUTOLOAD', '1')


def train(ctx: FragmentContext, folder: Path) -> None:
    import os

    import torch.distributed as dist

    total = torch.tensor([1 + ctx.rank])
    dist.all_reduce(total)
    seen = str(ctx.device), os.environ['CUDA_VISIBLE_DEVICES'], ctx.world_size, total.item()
    (folder / f'{ctx.fragment}-{ctx.rank}').write_text(json.dumps(seen))
    raise torch.AcceleratorError(f'{FAULT}\nCompile with TORCH_USE_CUDA_DSA')


@pytest.mark.long
@pytest.mark.usefixtures('two_devices')
def test_a_broken_device_is_a_preemption_and_its_node_is_avoided(tmp_path: Path) -> None:
    seen = tmp_path / 'seen'
    seen.mkdir()
    with freetrain(tmp_path, LocalSite(nodes=3, poll_s=0.2)) as executor:
        future = freetrain_app(max_nodes=1, total_epochs=2)(train)(seen)
        with pytest.raises(torch.AcceleratorError, match=FAULT) as raised:
            future.result(LIMIT_S)
    told = {path.name: json.loads(path.read_text()) for path in seen.iterdir()}
    assert len(told) == 6
    parts = [[told[f'{fragment}-{rank}'][1] for rank in range(2)] for fragment in (1, 2, 3)]
    assert sorted(map(tuple, parts)) == list(zip(PARTS[::2], PARTS[1::2], strict=True))
    assert all([one[0], *one[2:]] == ['cuda:0', 2, 3] for one in told.values())
    with Journal(executor.ledger_path) as ledger:
        fragments = ledger.history().fragments
    assert [fragment.ending for fragment in fragments] == ['preempted', 'preempted', 'failed']
    assert f' has a broken device: {FAULT};' in fragments[0].error
    assert any(f'{FAULT} (on 3 nodes: ' in note for note in raised.value.__notes__)
