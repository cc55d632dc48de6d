"""The configuration with which Parsl's own test suite meets FreeTrainExecutor."""

import os

from parsl.config import Config

from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider


def fresh_config() -> Config:
    return Config(
        executors=[
            FreeTrainExecutor(
                label='freetrain',
                provider=BackfillProvider(site=LocalSite(nodes=1, poll_s=0.2)),
                max_workers_per_node=2,
                checkpoint_dir=os.path.join(
                    os.environ.get('FREETRAIN_CONFORMANCE_DIR', '.'), 'checkpoints'
                ),
            )
        ],
        strategy='none',
    )
