"""One training on a real Slurm and a real PBS at once, in rounds of pieces."""

import os
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
@pytest.mark.usefixtures('nodes_share_a_template')
def test_replicas_train_on_both(slurm: Cluster, openpbs: PbsCluster, tmp_path: Path) -> None:
    """Each of PBS's nodes has a network of its own, from which Slurm's are not reached."""
    here = os.readlink(network := '/proc/self/ns/net')
    networks = {openpbs.control('on', f'node0{n}', 'readlink', network).strip() for n in (1, 2)}
    assert len({here, *networks}) == 3
    with openpbs.templates() as use_template:
        worker_init = f'export PATH={Path(sys.executable).parent}:$PATH; {use_template}'
        slurm_site = ft.SlurmSite(partition='batch', **QUICK)
        pbs_site = ft.PbsSite(queue='batch', worker_init=worker_init, **QUICK)
        sites: Any = {'slurm': (slurm_site, '127.0.0.1'), 'pbs': (pbs_site, ADDRESS)}
        both = app(mode=FOUR, total_samples=32 * 5, executor=('slurm', 'pbs'))
        with several(tmp_path, **sites) as executors:
            found = both().result(LIMIT_S)
    with freetrain(tmp_path / 'alone', ft.LocalSite(nodes=1, poll_s=0.2)):
        assert ft.same_weights(found, both.with_options(executor=None)().result(LIMIT_S))
    for executor, pieces in zip(executors, (2 * 10 + 1, 2 * 10), strict=True):
        history = Journal(executor.ledger_path).history()
        assert len(history.fragments) >= pieces
        assert all(node.name.startswith('node') for node in history.nodes)
