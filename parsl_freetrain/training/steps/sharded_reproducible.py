"""Reproducible mode for models whose parameters are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.collectives import Subgroup
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.steps import row_norm
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.nonfinite import all_finite
from parsl_freetrain.training.steps.notes import Notes
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps
from parsl_freetrain.training.steps.shard_sum import Contribution
from parsl_freetrain.training.steps.sharded import SumOfShards


class ShardedReproducibleSteps(ReproducibleSteps):
    """As :class:`~.reproducible.ReproducibleSteps`; the ranks of 'shard' take neighbouring virtual
    shards, which FSDP adds up along the tree. Micro-batches, tree, order of squares and the
    optimizer are the same in any shape.
    """

    adds_buffers = False  # they are refused

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
        self._by_fsdp = SumOfShards(prepared.models, shape.shard)
        self._buffer_changes: list[torch.Tensor] = []

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        super().begin_micro_batch(micro_batch)
        self._by_fsdp.weights = list(map(self._sum.weight, range(*self._node_of(micro_batch))))

    def _put_buffers(self, into: Contribution, weight: float) -> None:
        self._buffer_changes += self._buffers.changed()

    def _take_buffers(self, total: Contribution, notes: Sequence[Notes]) -> None:
        pass

    def _culprits(self, total: Contribution) -> list[int] | None:
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        whole = self._sum.spoilt.double()
        if self._width == 1:
            own = self._sum.bad or [whole]
        else:  # in wider shapes, each rank has sums of several ranks' gradients
            own = [*torch.stack(self._by_fsdp.seen() or [zero]).isfinite().logical_not()]
        changed, self._buffer_changes = self._buffer_changes, []
        gradients = self._guard.changed()
        sums = [torch.stack(numbers).sum() if numbers else zero for numbers in (own, changed)]
        row = [whole, *sums, zero if gradients is None else gradients.double()]
        rows = self._all.all_gather(torch.stack(row)).tolist()
        if any(row[2] for row in rows):
            raise BadInput(
                'A buffer has changed in a forward pass, as in batch normalisation; reproducible '
                'mode cannot add up buffers of sharded models: use a normalisation without running '
                'statistics, or mode=Throughput().'
            )
        if any(row[3] for row in rows):
            self._guard.refuse()
        if not any(row[0] for row in rows):
            return None
        # Norms may overflow where no number is infinite.
        (spoilt,) = self._all.all_reduce_max((not all_finite(total.gradients),))()
        named = [rank for rank, row in enumerate(rows) if row[1]]
        return (named or list(range(len(rows)))) if spoilt else None

    def _clip_gradients(self, largest: float, parameters: Sequence[torch.nn.Parameter]) -> None:
        row_norm.clip(parameters, self._mesh, largest)
