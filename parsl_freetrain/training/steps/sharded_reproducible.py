"""Reproducible mode for models whose parameters are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.collectives import Subgroup
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.steps import row_norm
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps
from parsl_freetrain.training.steps.sharded import SumOfShards


class ShardedReproducibleSteps(ReproducibleSteps):
    """As :class:`~parsl_freetrain.training.steps.reproducible.ReproducibleSteps`; in each
    micro-batch the ranks of 'shard' take neighbouring virtual shards, and FSDP adds them up along
    the tree.

    Each rank then has the sums of its own parts of the parameters. What is the same in any shape:
    the micro-batches, the tree, the order in which squares are added up for a norm, and the
    optimizer, which treats each element by itself.
    """

    def __init__(
        self,
        prepared: Prepared,
        peers: Peers,
        division: Division,
        shards: int,
        clip_grad_norm: float | None,
        device: torch.device,
        in_hook: Callable[[], bool],
    ) -> None:
        mesh, shape = division.mesh, division.shape
        copies = Subgroup(mesh.get_group('data')) if shape.data > 1 else Peers()
        super().__init__(prepared, copies, shards, clip_grad_norm, device, in_hook)
        self._all, self._mesh = peers, mesh
        self._width, self._place = shape.shard, mesh['shard'].get_local_rank()
        self._sum = SumOfShards(prepared.models, shape.shard)

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        super().begin_micro_batch(micro_batch)
        sizes = self._sizes[slice(*self._node_of(micro_batch))]
        self._sum.weights = [size / sum(self._sizes) for size in sizes]

    def _complete(self) -> None:
        """Add up what FSDP has not: the numbers for schedulers."""
        for buffer in self._buffers.changed():
            raise BadInput(
                f'A buffer of shape {tuple(buffer.shape)} has changed in a forward pass, as in '
                'batch normalisation; reproducible mode cannot add up buffers of sharded '
                'models: use a normalisation without running statistics, or '
                'mode=Throughput().'
            )
        if self._width > 1 and any(calls and calls[-1] is not None for calls in self._scheduled):
            values = self._layout.values(self._own)
            rows = [torch.empty_like(values) for _ in range(self._width)]
            dist.all_gather(rows, values.contiguous(), group=self._mesh.get_group('shard'))
            sums = self._sum.add_up(rows)
            values.copy_(sums)

    def _exchange(self, wish: int, bad: bool) -> tuple[int, list[int]]:
        super()._exchange(wish, bad)
        total = self._tree.total(self._sums, self._layout.plus)
        assert total is not None
        self._sums = {self._tree.root: total}
        # Sums may overflow where no term is infinite, and only on the rank that has the parameter.
        bad = bad or self._sum.saw_bad()
        own = [wish, not self._layout.is_finite(total), bad, *self._settings.digest()]
        said = self._all.all_gather(torch.tensor(own, dtype=torch.uint8, device=self._device))
        self._compare(said[:, 3:], self._all)
        rows = said.tolist()
        spoilt = any(row[1] or row[2] for row in rows)
        named = [rank for rank, row in enumerate(rows) if row[2]]
        return max(row[0] for row in rows), named or list(range(len(rows))) * spoilt

    def _clip_gradients(self, largest: float) -> None:
        row_norm.clip(self._layout.parameters, self._mesh, largest)
