"""How the ranks of a fragment share the work."""

import math
from dataclasses import dataclass

from parsl_freetrain.core.model.errors import BadInput

MESH = ('data', 'shard', 'depth', 'height', 'width', 'pipeline', 'tensor')
"""The dimensions of a :class:`Shape`; ranks are numbered along the last one first."""


@dataclass(frozen=True)
class Shape:
    """How the ranks of a fragment share the work: copies of the model, shards of its parameters,
    parts of space, stages of a pipeline, parts of each layer. Raises BadInput for numbers below 1.
    """

    #: Copies of the model. They train different samples.
    data: int = 1
    spatial: tuple[int, int, int] = (1, 1, 1)  #: parts of each sample in depth, height and width
    pipeline: int = 1  #: stages that the model's layers are divided into
    #: Ranks that divide the parameters of a copy among them (FSDP). They train different samples.
    shard: int = 1
    #: Ranks that divide the work of each layer (tensor parallelism). They train the same samples.
    tensor: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.spatial, (tuple, list)) or len(self.spatial) != 3:
            raise BadInput(
                'A shape divides space in depth, height and width: spatial is '
                f'{self.spatial!r}; it must have 3 numbers.'
            )
        object.__setattr__(self, 'spatial', tuple(self.spatial))  # JSON knows lists only
        for what, parts in zip(MESH, self.sizes, strict=True):
            if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
                raise BadInput(
                    f'A shape has {parts!r} ranks along {what}; it must be a whole '
                    'number, 1 or more.'
                )

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """Ranks along each of :data:`MESH`."""
        return self.data, self.shard, *self.spatial, self.pipeline, self.tensor

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def batch_parts(self) -> int:
        """Number of groups of ranks that train different samples."""
        return self.data * self.shard

    @property
    def sharded(self) -> bool:
        """Whether parameters are divided among ranks, as FSDP and tensor parallelism do."""
        return self.shard * self.tensor > 1

    def __str__(self) -> str:
        parts = [f'data {self.data}']
        parts += [f'shard {self.shard}'] * (self.shard > 1)
        if not self.sharded:
            parts += [f'spatial {"x".join(map(str, self.spatial))}', f'pipeline {self.pipeline}']
        parts += [f'tensor {self.tensor}'] * (self.tensor > 1)
        return ' x '.join(parts)
