"""One training on a real Slurm and a real PBS at once, in rounds of pieces."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.journal.read import Journal
from tests.executor.test_replicas import FOUR, app, several
from tests.sites.batch_blocks import QUICK
from tests.support.file_system_shim import Shim, compiler
from tests.support.openpbs import ADDRESS, PbsCluster
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, slowness, wait_until


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.pbs
@pytest.mark.usefixtures('has_slurm')
def test_replicas_train_on_both(
    openpbs: PbsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On nodes each of which reaches no other one, but only the computer that submits."""
    own: Any = {'most_nodes': 1, **QUICK}
    both = app(mode=FOUR, total_samples=32 * 3, executor=('slurm', 'pbs'))
    computers = {'SLURM_CLUSTER_NODES_AS': 'computers'}
    with (
        openpbs.templates() as use_template,
        openpbs.apart(),
        Cluster.running(2, within='/tmp', **computers) as slurm,
    ):
        monkeypatch.setenv('SLURM_CONF', str(slurm.conf))
        nobody_reaches_another(slurm, openpbs)
        worker_init = f'export PATH={Path(sys.executable).parent}:$PATH; '
        slurm_site = ft.SlurmSite(partition='batch', worker_init=worker_init, **own)
        pbs_site = ft.PbsSite(queue='batch', worker_init=worker_init + use_template, **own)
        sites: Any = {'slurm': (slurm_site, '10.78.8.254'), 'pbs': (pbs_site, ADDRESS)}
        with several(tmp_path, **sites) as executors:
            found = both().result(LIMIT_S)
    with freetrain(tmp_path / 'alone', ft.LocalSite(nodes=1, poll_s=0.2)):
        assert ft.same_weights(found, both.with_options(executor=None)().result(LIMIT_S))
    for executor, pieces in zip(executors, (2 * 6 + 1, 2 * 6), strict=True):
        history = Journal(executor.ledger_path).history()
        assert len(history.fragments) >= pieces
        assert all(node.name.startswith('node') for node in history.nodes)


def nobody_reaches_another(slurm: Cluster, pbs: PbsCluster) -> None:
    """What listens on nodes is reached from this computer and from the node itself only."""
    base = int((slurm.folder / 'settings').read_text().rpartition('BASE=')[2])
    ports = {f'10.78.8.{n}': base + n for n in (1, 2)} | {f'10.77.7.{n}': 15002 for n in (1, 2)}
    for at, port in ports.items():
        word = f'timeout 2 bash -c "echo > /dev/tcp/{at}/{port}" 2> /dev/null && echo reached; true'
        assert subprocess.check_output(word, shell=True) == b'reached\n'
        for cluster, network in ((slurm, '10.78.8'), (pbs, '10.77.7')):
            for n in (1, 2):
                said = cluster.control('on', f'node0{n}', 'sh', '-c', word)
                assert (said == 'reached\n') is (at == f'{network}.{n}'), (at, network, n)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.pbs
@pytest.mark.skipif(compiler() is None, reason='needs a C compiler')
def test_nodes_whose_clocks_differ_train_until_their_known_end(
    slurm: Cluster, openpbs: PbsCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ahead by 20 s, the end of a block seemed to have come; behind, its last save was missed."""
    shim = Shim(tmp_path)
    for n in range(4):
        shim.set_clock(f'node0{n + 1}', 20 if n % 2 else -20, n)
    lines = [f'export {name}={value}' for name, value in shim.environment.items()]
    lines.append('export FREETRAIN_NODE=${SLURMD_NODENAME:-$(hostname)}')  # for the script itself
    path = f'export PATH={Path(sys.executable).parent}:$PATH'
    how: Any = {'longest_s': max(60.0, 15.0 * slowness()), **QUICK}
    how['worker_init'] = '; '.join([path, *lines])
    sites: Any = {
        'slurm': (ft.SlurmSite(partition='batch', **how), '127.0.0.1'),
        'pbs': (ft.PbsSite(queue='batch', **how), ADDRESS),
    }
    trainer = ft.freetrain_app(
        max_nodes=1, total_epochs=10**6, checkpoints=ft.Checkpoints(every_s=1000.0)
    )(fit)
    with several(tmp_path, **sites) as executors:
        futures = [
            trainer.with_options(executor=name)(pause_s=0.2, trainer_name=f'{name}{n}')
            for name in sites
            for n in range(2)
        ]

        def ended() -> dict[str, ev.FragmentEnded]:
            """The first fragment of each trainer that has saved at the end of its block."""
            found = [e for one in executors for e in endings(Path(one.ledger_path))]
            return {e.trainer: e for e in reversed(found) if e.ending == 'stopped' and e.committed}

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
