"""Some of the ranks of a fragment: those of one process group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from parsl_freetrain.training.comm.collectives import as_peer_loss, broadcast_into
from parsl_freetrain.training.comm.devices import GLOO
from parsl_freetrain.training.comm.in_place_exchange import complete_rows, on_cpu
from parsl_freetrain.training.comm.peers import Alone


class Subgroup(Alone):
    """The ranks of a process group, numbered as in the group. Only :meth:`all_gather`,
    :meth:`all_to_all`, :meth:`all_gather_into_tensor` and :meth:`broadcast` exchange.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        sent = row.cpu() if dist.get_backend(self._group) == GLOO else row
        rows = sent.new_empty(self.world_size, len(sent))
        dist.all_gather(list(rows), sent, group=self._group)
        return rows.to(row.device)

    def all_to_all(
        self, row: torch.Tensor, sent: Sequence[int], received: Sequence[int], into: torch.Tensor
    ) -> None:
        with self._on_cpu(into) as got:
            own = row.to(got.device)
            dist.all_to_all_single(got, own, list(received), list(sent), group=self._group)

    def all_gather_into_tensor(self, rows: torch.Tensor) -> None:
        with self._on_cpu(rows) as here:
            complete_rows(here, self.rank, self._group)

    def _on_cpu(self, tensor: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        return on_cpu(tensor, dist.get_backend(self._group) == GLOO)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        with as_peer_loss():
            for tensor in tensors:
                source = dist.get_global_rank(self._group, 0)
                broadcast_into(tensor, src=source, group=self._group)
