"""Some of the ranks of a fragment: those of one process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parsl_freetrain.training.comm.collectives import Alone
from parsl_freetrain.training.comm.devices import GLOO


class Subgroup(Alone):
    """The ranks of a process group, numbered as in the group. Only :meth:`gather` and
    :meth:`all_to_all` exchange.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        sent = row.cpu() if dist.get_backend(self._group) == GLOO else row
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(rows, sent, group=self._group)
        return [other.to(row.device) for other in rows]

    def all_to_all(
        self, row: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        own = row.cpu() if dist.get_backend(self._group) == GLOO else row
        got = own.new_empty(sum(received))
        dist.all_to_all_single(got, own, list(received), list(sent), group=self._group)
        return got.to(row.device)
