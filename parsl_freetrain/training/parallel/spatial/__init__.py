"""Layers for networks whose volumes are divided among ranks, with torch's names and arguments."""

from parsl_freetrain.training.parallel.spatial.grid import Axis, Grid
from parsl_freetrain.training.parallel.spatial.layers import (
    AvgPool3d,
    BatchNorm3d,
    Conv3d,
    ConvTranspose3d,
    MaxPool3d,
)
from parsl_freetrain.training.parallel.spatial.sharded_volume import (
    Sharded,
    ShardedVolumes,
    check_division,
    concatenate,
    total,
)

__all__ = [
    'AvgPool3d', 'Axis', 'BatchNorm3d', 'Conv3d', 'ConvTranspose3d', 'Grid', 'MaxPool3d',
    'Sharded', 'ShardedVolumes', 'check_division', 'concatenate', 'total',
]  # fmt: skip
