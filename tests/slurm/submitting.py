"""A submitting process to be killed: ``python -m tests.slurm.submitting FOLDER EPOCHS PAUSE_S
[SETTING=VALUE ...]``. At the end it says, as JSON, where the last checkpoint is.
"""

import json
import sys
from pathlib import Path

from parsl_freetrain import Checkpoints, Reproducible, Scaling, freetrain_app
from tests.sites.slurm.conftest import slurm_site
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S


def main(folder: str, epochs: str, pause_s: str) -> None:
    trainer = freetrain_app(
        max_nodes=2,
        total_epochs=float(epochs),
        checkpoints=Checkpoints(every_s=0.5),
        scaling=Scaling(rate={1: 1.0, 2: 1.9}, rescale_up_s=0.1, rescale_down_s=0.1),
        mode=Reproducible(shards=2),
    )(fit)
    with freetrain(
        Path(folder),
        slurm_site(longest_s=600, interface='lo'),
        heartbeat_period=1,
        heartbeat_threshold=4,
        hang_s=8.0,
    ) as executor:
        print(json.dumps({'run': executor.run_id}), flush=True)
        done = trainer(pause_s=float(pause_s)).result(LIMIT_S)
    print(json.dumps({'samples': done.samples, 'path': str(done.path)}), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
