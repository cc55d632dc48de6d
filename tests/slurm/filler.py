"""Fills a machine's holes with training until its input ends: ``python -m tests.slurm.filler FOLDER
KIND SETTINGS [ADDRESS]``, SETTINGS of a site of this KIND as JSON. Says 'ready', begins at a line
'NODES TRAINERS', says 'training' when so many train, and at the end the blocks' seconds as JSON.
"""

import json
import sys
from concurrent.futures import wait
from pathlib import Path

from parsl_freetrain import Checkpoints, Scaling, freetrain_app
from parsl_freetrain.core.model.events import NodesNeeded
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.registry import site_types
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

PAUSE_S = 0.25  # a step takes as long on every computer
SETTLED = 80  # samples, ten steps: what starts a training is over


def main(folder: str, kind: str, settings: str, address: str | None = None) -> None:
    # One node each: whatever hole there is, a trainer fits.
    often, quick = Checkpoints(every_s=5.0), Scaling(rescale_up_s=0.1, rescale_down_s=0.1)
    trainer = freetrain_app(max_nodes=1, total_epochs=1e6, checkpoints=often, scaling=quick)(fit)
    site = site_types()[kind].make(**json.loads(settings))
    assert isinstance(site, BatchSite)
    with freetrain(
        Path(folder), site, heartbeat_period=1, heartbeat_threshold=5, hang_s=8.0, address=address
    ) as executor:
        print('ready', flush=True)
        nodes, trainers = map(int, sys.stdin.readline().split())
        futures = [
            trainer(pause_s=PAUSE_S, trainer_name=f'trainer-{number}') for number in range(trainers)
        ]
        wait_until(
            lambda: sum(f.running() and f.progress().samples >= SETTLED for f in futures) >= nodes
        )
        print('training', flush=True)
        sys.stdin.read()
        for future in futures:
            future.cancel()
        wait(futures, timeout=LIMIT_S)
    history = Journal(executor.ledger_path).history()
    needs = [
        [sorted({demand.job for demand in event.demands}), event.at]
        for _, event in Journal(executor.ledger_path).events()
        if isinstance(event, NodesNeeded)
    ]
    names = {node.node: node.name for node in history.nodes}
    fragments = [
        [names[f.nodes[0]], f.started_at, f.ended_at] for f in history.fragments if f.started_at
    ]
    said = {'node_s': summary(history)['node_s'], 'commands': site.client.commands}
    print(json.dumps({**said, 'fragments': fragments, 'needs': needs}), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
