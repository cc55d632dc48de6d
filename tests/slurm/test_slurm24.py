"""A training on the real Slurm 24.11: unlike nodes, a preemption, a reservation; same result."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import Checkpoints, Reproducible, freetrain_app
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.sites.batch import queue_watch
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import slurm_24_11
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.long, pytest.mark.slurm24]


def say(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@freetrain_app(
    max_nodes=2, total_epochs=20, mode=Reproducible(shards=2), checkpoints=Checkpoints(every_s=0.5)
)
def train(ctx: Any, go: str) -> list[list[float]]:
    """Slow until there is the file ``go``."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    for (features,) in ctx.loop(TensorDataset(x), batch_size=8):
        optimizer.zero_grad()
        (model(features) - features.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.0 if Path(go).exists() else 1.0)
    return [p.detach().flatten().tolist() for p in model.parameters()]


def test_a_training_on_unlike_nodes_survives_a_preemption_and_a_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / 'go'
    monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))  # where answers are shared
    monkeypatch.setattr(queue_watch, 'RESERVATIONS_EVERY_S', 3.0)
    with slurm_24_11(tmp_path, monkeypatch, SLURM_CLUSTER_LARGE='1'):
        for number, kind in enumerate(('skylake', 'icelake', 'icelake', 'icelake'), 1):
            features = f'AvailableFeatures={kind},big', f'ActiveFeatures={kind}'
            say('scontrol', 'update', f'NodeName=node0{number}', *features)
        site = slurm_site('scavenger', mode='preemptible', constraint='icelake', interface='lo')
        with freetrain(tmp_path, site, heartbeat_period=1, heartbeat_threshold=4) as executor:
            future = train(str(go))

            def goes_on() -> None:
                before = future.progress().samples
                wait_until(lambda: future.done() or future.progress().samples > before)
                assert not future.done()

            goes_on()
            wide = say(
                *('sbatch', '--parsable', '-N3', '-C', 'icelake', '-p', 'batch', '--exclusive'),
                *('-t', '1', '-o', '/dev/null', '--wrap=sleep 3'),
            )
            wait_until(
                lambda: say('squeue', '-h', '-t', 'all', '-j', wide, '-o', '%T') == 'COMPLETED'
            )
            assert say('squeue', '-h', '-t', 'PREEMPTED', '-o', '%i')
            goes_on()
            say(
                *('scontrol', 'create', 'reservation', 'ReservationName=maint', 'StartTime=now'),
                *('Duration=60', 'Users=root', 'Flags=MAINT,IGNORE_JOBS', 'Nodes=node[02-03]'),
                'Comment=Nodes=node04_StartTime=1',
            )
            running = 'squeue', '-h', '-t', 'R', '-w', 'node02,node03', '-o', '%i'
            wait_until(lambda: not say(*running))
            goes_on()
            assert not say(*running)
            go.touch()
            found = future.result(LIMIT_S)
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    assert {node.name for node in history.nodes} <= {'node02', 'node03', 'node04'}
    assert found.result == train.debug(str(go)).result
