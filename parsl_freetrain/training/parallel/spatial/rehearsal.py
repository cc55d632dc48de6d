"""Whether a network can be divided, before anything is submitted, computed or sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import nn

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial.grid import Grid
from parsl_freetrain.training.parallel.spatial.sharded_volume import Sharded

Extents = tuple[int, int, int]


def check_division(network: nn.Module, channels: int, extents: Extents, spatial: Extents) -> None:
    """Refuse a division that is not possible for a layer of a network that takes a
    :class:`.Sharded`: a part of a layer's output would be empty, or would need more than its
    neighbours have. ``channels, extents``: of its input, extents in voxels of depth, height and
    width; ``spatial``: numbers of parts along these. Raises BadInput, which says which divisions
    are possible.
    """
    made = copy.deepcopy(network).to('meta').eval()
    try:
        _rehearse(made, channels, extents, spatial)
    except BadInput as error:
        depth, height, width = (range(1, parts + 1) for parts in spatial)
        goes = partial(_rehearse, made, channels, extents)
        could = [wish for wish in product(depth, height, width) if _goes(partial(goes, wish))]
        coarsest = [wish for wish in could if not any(_finer(other, wish) for other in could)]
        best = ', '.join('x'.join(map(str, wish)) for wish in coarsest)
        raise BadInput(
            f'Volumes of {"x".join(map(str, extents))} cannot be divided into '
            f'{"x".join(map(str, spatial))} parts for this network, which can have '
            f'{f"at the finest {best}" if could else "no division of them"}: {error}'
        ) from error


@torch.no_grad()
def _rehearse(network: nn.Module, channels: int, extents: Extents, spatial: Extents) -> None:
    grid = Grid.rehearsal(spatial)
    own = [place.stop - place.start for place in grid.own(grid.layout(extents))]
    network(Sharded.of(torch.empty(1, channels, *own, device='meta'), extents, grid))


def _goes(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except BadInput:
        return False
    return True


def _finer(one: Extents, other: Extents) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))
