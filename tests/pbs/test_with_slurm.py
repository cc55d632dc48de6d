"""One training on a real Slurm and a real PBS at once, in rounds of pieces."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import parsl_freetrain as ft
from parsl_freetrain.journal.read import Journal
from tests.executor.test_replicas import FOUR, app, several
from tests.sites.batch_blocks import QUICK
from tests.support.openpbs import ADDRESS, PbsCluster
from tests.support.slurm import Cluster
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S


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
