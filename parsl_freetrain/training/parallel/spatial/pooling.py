"""Pooling of divided volumes, with torch's arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial.halo import fetch, plan_window
from parsl_freetrain.training.parallel.spatial.sharded_volume import Sharded


class MaxPool3d(nn.MaxPool3d):
    """``torch.nn.MaxPool3d`` for :class:`.Sharded`, without ``ceil_mode`` and ``return_indices``.

    Raises
    ------
    BadInput
        In ``forward``, if a part of the output would be empty or the halo would be wider than the
        neighbouring part; in the constructor, if one of the missing options is given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ceil_mode or self.return_indices:
            raise BadInput(
                'Pooling of divided volumes has no ceil_mode and no return_indices: leave them out.'
            )

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        numbers = self.kernel_size, self.stride, self.padding, self.dilation
        layout, needed, padding = plan_window(x.layout, x.grid, *numbers)
        whole = fetch(x.local, needed, x.grid, fill=-math.inf)
        local = F.max_pool3d(whole, self.kernel_size, self.stride, padding, self.dilation)
        return replace(x, local=local, layout=layout)


class AvgPool3d(nn.AvgPool3d):
    """``torch.nn.AvgPool3d`` for :class:`.Sharded`, in which padding counts; without
    ``ceil_mode`` and ``divisor_override``.

    Raises
    ------
    BadInput
        As :class:`MaxPool3d` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ceil_mode or not self.count_include_pad or self.divisor_override is not None:
            raise BadInput(
                'Pooling of divided volumes takes neither ceil_mode nor divisor_override, and '
                'padding counts: leave them out, and count_include_pad at True.'
            )

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        numbers = self.kernel_size, self.stride, self.padding, 1
        layout, needed, padding = plan_window(x.layout, x.grid, *numbers)
        local = F.avg_pool3d(fetch(x.local, needed, x.grid), self.kernel_size, self.stride, padding)
        return replace(x, local=local, layout=layout)
