"""Parameters divided among ranks (FSDP2, tensor parallelism): what is refused; gradients' sums."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.collectives import Subgroup
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.spec.mode import Mode, Reproducible
from parsl_freetrain.training.steps import row_norm
from parsl_freetrain.training.steps.accumulation import weigh
from parsl_freetrain.training.steps.mesh import Division, Stepped, fsdp_modules
from parsl_freetrain.training.steps.nonfinite import all_finite
from parsl_freetrain.training.steps.notes import Notes
from parsl_freetrain.training.steps.reduction_tree import ShardTree
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps
from parsl_freetrain.training.steps.shard_sum import Contribution

_DIMENSIONS = {'shard', 'tensor'}
_NAMES = 'Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD'
_ELEMENTWISE = {getattr(torch.optim, name) for name in _NAMES.split()}


def check_sharded(prepared: Prepared, division: Division, mode: Mode) -> None:
    """Refuse (BadInput) what a shape that divides parameters cannot train, as the mode promises."""
    groups = [group for optimizer in prepared.optimizers for group in optimizer.param_groups]
    known = {id(parameter) for group in groups for parameter in group['params']}
    parted = bool(fsdp_modules(prepared.models)) or division.shape.sharded
    for number, model in enumerate(prepared.models, 1):
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            what = f'Parameter {name!r} of model {number} of ctx.prepare'
            if id(parameter) not in known:
                raise BadInput(
                    f'{what} is in no optimizer: make the optimizer after ctx.shard, from '
                    'model.parameters(), or freeze it with requires_grad_(False).'
                )
            if parted:
                _check_mesh(what, parameter, division)
            if isinstance(mode, Reproducible) and torch.finfo(parameter.dtype).bits < 32:
                raise BadInput(
                    f'{what} is of type {parameter.dtype}, in which a reproducible sum would '
                    'depend on the ranks: keep parameters in float32, and compute in less by '
                    'precision=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32).'
                )
    if isinstance(mode, Reproducible):
        _check_reproducible(prepared)


def _check_mesh(what: str, parameter: torch.Tensor, division: Division) -> None:
    if not isinstance(parameter, DTensor):
        if division.parts > 1:
            raise BadInput(
                f'{what} is not sharded (the shape is {division.shape}): divide the whole model '
                'with ctx.shard, or call fully_shard on all of it.'
            )
        return
    names = tuple(parameter.device_mesh.mesh_dim_names or ())
    if (
        not names
        or not _DIMENSIONS.issuperset(names)
        or parameter.device_mesh != division.mesh[names]
        or (division.parts > 1 and 'shard' not in names)
    ):
        raise BadInput(
            f'{what} is sharded over another mesh ({parameter.device_mesh}): use ctx.shard, or '
            "fully_shard(..., mesh=ctx.mesh['shard']) and, for tensor parallelism, "
            "ctx.mesh['tensor']; copies (data) are averaged by ctx.prepare."
        )


def _check_reproducible(prepared: Prepared) -> None:
    for optimizer in prepared.optimizers:
        # A class that is derived from one of torch's may have another step.
        if type(optimizer) not in _ELEMENTWISE and not getattr(optimizer, 'elementwise', False):
            raise BadInput(
                f'ctx.prepare was given {type(optimizer).__name__}, which is not known to treat '
                'each element by itself, so its result would depend on how parameters are divided: '
                'use mode=Throughput(), or an elementwise optimizer such as AdamW (a class of your '
                'own says so by elementwise = True).'
            )
    for module in fsdp_modules(prepared.models):
        policy = module._get_fsdp_state()._mp_policy
        reduced = policy.reduce_dtype or policy.param_dtype or torch.float32
        if torch.finfo(reduced).bits < 32:
            raise BadInput(
                f'ctx.prepare was given a model whose gradients are added up in {reduced}, in '
                'which a reproducible sum would depend on the ranks: say '
                'precision=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32).'
            )


class MeanOfParts(DefaultReduceScatter):
    """Throughput mode: the mean over the samples of a global batch; copies of the model are added
    up after FSDP's reduce-scatter. ``weight``: this rank's share; ``alike``: all have the same.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        division: Division,
        note: Callable[[torch.Tensor], None],
    ) -> None:
        self.weight, self.alike = 1.0, False
        self._note = note
        self._least = math.inf
        copies = division.mesh.get_group('data') if division.shape.data > 1 else None
        alone = division.shape.shard == 1

        def after(sums: torch.Tensor) -> None:
            if alone:  # then there is no reduce-scatter
                self._look(sums)
                weigh(sums, self.weight)
            if copies is not None:
                dist.all_reduce(sums, group=copies)

        for module in fsdp_modules(models):
            module.set_custom_reduce_scatter(self)
            module.set_gradient_divide_factor(1.0)
            if alone or copies is not None:
                module.set_all_reduce_hook(after)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._look(input_tensor)
        if not self.alike:
            weigh(input_tensor, self.weight)
        mean = self.alike and self.weight * group.size() == 1
        how = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM  # as plain FSDP does it
        super().__call__(output_tensor, input_tensor, group, how)
        if self.alike and not mean:
            weigh(output_tensor, self.weight)

    def _look(self, gradient: torch.Tensor) -> None:
        """Note the smallest gradient only: if a loss is not finite, nearly always all show it."""
        self._least = min(self._least, gradient.numel())
        if gradient.numel() == self._least:
            self._note(gradient)


class SumOfShards(ReduceScatter):
    """Reproducible mode: the sum over a block of virtual shards, one on each rank of FSDP, along
    the same tree as on one rank. ``weights``: of its shards, relative to the largest; 0: empty.
    """

    def __init__(self, models: Sequence[torch.nn.Module], parts: int) -> None:
        self.weights: list[float] = []
        self._tree = ShardTree(parts)
        self._seen: list[torch.Tensor] = []
        self._least = math.inf
        for module in fsdp_modules(models):
            module.set_custom_reduce_scatter(self)
            module.set_gradient_divide_factor(1.0)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if (weight := self.weights[dist.get_rank(group)]) != 1:
            input_tensor.mul_(weight)
        self._least = min(self._least, input_tensor.numel())
        if input_tensor.numel() == self._least:
            self._seen.append(input_tensor.sum(dtype=torch.float64))
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        output_tensor.copy_(self.add_up(received.view(len(self.weights), -1)))

    def add_up(self, rows: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """The sum of the rows of the shards that are not empty. It overwrites rows."""
        total = self._tree.total(
            {(i, i + 1): rows[i] if weight else None for i, weight in enumerate(self.weights)},
            torch.Tensor.add_,
        )
        assert total is not None
        return total

    def seen(self) -> list[torch.Tensor]:
        """Sums of the smallest gradients since the last call: enough to name the rank."""
        seen, self._seen = self._seen, []
        return seen


class ShardedReproducibleSteps(ReproducibleSteps):
    """As :class:`~.reproducible.ReproducibleSteps`; the ranks of 'shard' take neighbouring virtual
    shards, which FSDP adds up along the tree. Micro-batches, tree, order of squares and the
    optimizer are the same in any shape.
    """

    adds_buffers = False  # they are refused

    def __init__(self, what: Stepped) -> None:
        mesh, shape = what.division.mesh, what.division.shape
        copies = Subgroup(mesh.get_group('data')) if shape.data > 1 else Peers()
        super().__init__(replace(what, peers=copies))
        self._all, self._mesh = what.peers, mesh
        self._width, self._place = shape.shard, mesh['shard'].get_local_rank()
        self._by_fsdp = SumOfShards(what.prepared.models, shape.shard)
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
        gradients, spoilt = self._looked_at(total)
        whole = spoilt.double()
        if self._width == 1:
            own = self._sum.bad or [whole]
        else:  # in wider shapes, each rank has sums of several ranks' gradients
            own = [*torch.stack(self._by_fsdp.seen() or [zero]).isfinite().logical_not()]
        changed, self._buffer_changes = self._buffer_changes, []
        touched = self._guard.changed()
        sums = [torch.stack(numbers).sum() if numbers else zero for numbers in (own, changed)]
        row = [whole, *sums, zero if touched is None else touched.double()]
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
        (infinite,) = self._all.all_reduce_max((not all_finite(gradients),))()
        named = [rank for rank, row in enumerate(rows) if row[1]]
        return (named or list(range(len(rows)))) if infinite else None

    def _clip_gradients(self, largest: float, parameters: Sequence[torch.nn.Parameter]) -> None:
        row_norm.clip(parameters, self._mesh, largest)
