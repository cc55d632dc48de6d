"""Which parts of a model FSDP2 has divided among ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def fsdp_modules(models: Iterable[torch.nn.Module]) -> list[FSDPModule]:
    # Its import takes long. Where it has not been imported there is none.
    fsdp = sys.modules.get('torch.distributed.fsdp')
    if fsdp is None:
        return []
    return [m for model in models for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


def put_parts_back(models: Iterable[torch.nn.Module]) -> None:
    """Have modules hold their parts again, after a pass that failed with whole parameters."""
    for module in fsdp_modules(models):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.to_sharded()
