"""Models whose parameters are divided among ranks: FSDP2 and tensor parallelism by one call."""

from parsl_freetrain.training.parallel.sharded.shard import shard_model

__all__ = ['shard_model']
