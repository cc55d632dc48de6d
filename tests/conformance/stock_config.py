"""The configuration to compare with: Parsl's own HighThroughputExecutor."""

from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider


def fresh_config() -> Config:
    return Config(
        executors=[
            HighThroughputExecutor(
                label='stock',
                address='127.0.0.1',
                max_workers_per_node=2,
                cores_per_worker=0.1,
                encrypted=True,
                provider=LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),  # type: ignore[no-untyped-call]
            )
        ],
        strategy='none',
    )
