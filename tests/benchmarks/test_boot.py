"""From a block's first instruction to the first step, on a real Slurm cluster; ``make bench``."""

import math
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.benchmarks.workload import MACHINE
from tests.sites.slurm.conftest import slurm_site
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slurm

ROUNDS = 3
AIM = 1.3
# Until the block's first instruction; the log of Parsl's manager, which has been imported then; the
# node's greeting, for which torch has been imported; the decision; the first training step.
PARTS = ('scheduler', 'shell, Parsl', 'greeting', 'decision', 'first step')
PLAIN = {
    'import torch': 'import torch',
    'the same and an optimizer': (
        'import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()'
    ),
}


def boot(folder: Path) -> list[float]:
    """Seconds from the block's submission to its first step, divided at the ends of the parts."""
    folder.mkdir(parents=True)
    begun = folder / 'begun'
    site = slurm_site(interface='lo', worker_init=f'date +%s.%N > {begun}')
    with freetrain(folder, site) as executor:
        trainer = freetrain_app(
            max_nodes=1, total_epochs=1e6, checkpoints=Checkpoints(every_s=1000.0)
        )(fit)
        training = trainer(pause_s=0.01)
        wait_until(lambda: training.progress().samples)
        training.cancel()
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    node, fragment = history.nodes[0], history.fragments[0]
    block = next(block for block in history.blocks if block.name == node.block)
    times = (
        block.opened.at,
        float(begun.read_text()),
        min(float(log.read_text().split()[0]) for log in folder.rglob('manager.log')),
        node.joined_at,
        fragment.launched.at,
        fragment.started_at or math.nan,
    )
    return [later - earlier for earlier, later in pairwise(times)]


def plain(statement: str) -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, '-c', statement], check=True)
    return time.monotonic() - begun


def test_node_to_its_first_step(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, list[list[float]]] = {}
    for turn in range(ROUNDS):
        for way in ('torch beside the manager', 'torch after the manager'):
            with monkeypatch.context() as patch:
                if way.startswith('torch after'):
                    patch.setattr('parsl_freetrain.executor.executor.TEMPLATE', '')
                found.setdefault(way, []).append(boot(tmp_path / f'{way}-{turn}'.replace(' ', '-')))
            slurm.wait(lambda: slurm.idle_nodes() == 4)
        for name, statement in PLAIN.items():
            found.setdefault(name, []).append([plain(statement)])
    # Without the scheduler's part.
    median_s = {
        name: statistics.median(sum(parts[-4:]) for parts in turns) for name, turns in found.items()
    }
    print(f'\nFrom the first instruction of a block, s, median of {ROUNDS} in turns ({MACHINE})')
    print(f'  {"":26} {" ".join(f"{part:>12}" for part in PARTS)} {"all but first":>14}')
    for name, turns in found.items():
        parts = [f'{statistics.median(part):12.2f}' for part in zip(*turns, strict=True)]
        print(f'  {name:26} {" ".join(parts) if len(parts) > 1 else "":>64} {median_s[name]:14.2f}')
    for name in PLAIN:
        ratio = median_s['torch beside the manager'] / median_s[name]
        print(f'  {ratio:.2f} x {name}: within {AIM:g} x {"yes" if ratio <= AIM else "no"}')
