"""Nodes whose clocks differ from the submitting computer's, on a real Slurm cluster."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.journal.read import Journal
from tests.sites.batch_blocks import QUICK
from tests.support.file_system_shim import Shim, compiler
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import slowness, wait_until


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.skipif(compiler() is None, reason='needs a C compiler')
def test_they_train_until_their_known_end(
    slurm: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ahead by 20 s, the end of a block seemed to have come; behind, its last save was missed."""
    shim = Shim(tmp_path)
    for n in range(4):
        shim.set_clock(f'node0{n + 1}', 20 if n % 2 else -20, n)
    lines = [f'export {name}={value}' for name, value in shim.environment.items()]
    lines.append('export FREETRAIN_NODE=$SLURMD_NODENAME')  # for the script itself
    path = f'export PATH={Path(sys.executable).parent}:$PATH'
    how: Any = {'longest_s': max(60.0, 15.0 * slowness()), **QUICK}
    site = ft.SlurmSite(partition='batch', worker_init='; '.join([path, *lines]), **how)
    trainer = ft.freetrain_app(
        max_nodes=1, total_epochs=10**6, checkpoints=ft.Checkpoints(every_s=1000.0)
    )(fit)
    with freetrain(tmp_path, site, address='127.0.0.1') as executor:
        futures = [trainer(pause_s=0.2, trainer_name=f't{n}') for n in range(2)]

        def ended() -> dict[str, ev.FragmentEnded]:
            """The first fragment of each trainer that has saved at the end of its block."""
            found = reversed(endings(Path(executor.ledger_path)))
            return {e.trainer: e for e in found if e.ending == 'stopped' and e.committed}

        wait_until(lambda: len(ended()) == len(futures))
        for future in futures:
            future.cancel()
        wait_until(lambda: all(future.done() for future in futures))
    shim.close()
    assert all(e.committed == e.reached for e in ended().values())
    assert {'ahead', 'behind'} == set(
        re.findall(r'clock of node .* is \d+ s (ahead|behind)', caplog.text)
    )


def endings(ledger: Path) -> list[ev.FragmentEnded]:
    with Journal(ledger) as journal:
        events = [event for _, event in journal.events(ev.FragmentEnded)]
    return [event for event in events if isinstance(event, ev.FragmentEnded)]
