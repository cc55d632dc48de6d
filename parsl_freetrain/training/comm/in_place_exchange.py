"""Exchanges that take no memory beside their result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def on_cpu(tensor: torch.Tensor, wanted: bool) -> Iterator[torch.Tensor]:
    """Where it is ``wanted``, a copy of a tensor that is on the CPU, and is copied back in the end;
    the tensor itself if it is there already.
    """
    here = tensor.cpu() if wanted else tensor
    yield here
    if here is not tensor:
        tensor.copy_(here)


def complete_rows(rows: torch.Tensor, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """Receive the rows of the other ranks where they belong, and send them this rank's.

    gloo's all_gather would take as much memory again, and copy all rows.
    """
    others = [other for other in range(len(rows)) if other != rank]
    ops = [dist.P2POp(dist.irecv, rows[other], group=group, group_peer=other) for other in others]
    ops += [dist.P2POp(dist.isend, rows[rank], group=group, group_peer=other) for other in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
