"""What virtual shards contribute to a global batch: gradients and buffers, which are added up."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import divided_like, is_divided, local, real
from parsl_freetrain.training.steps.buffers import Buffers, copy_all
from parsl_freetrain.training.steps.gradient_guard import in_graphs, refuse_overwritten, set_grad

_TENSOR: Any = torch.Tensor
_STRIDED = torch.strided
_SPARSE = (
    'Reproducible mode cannot add up sparse gradients: make the embedding with sparse=False, or '
    'use throughput mode.'
)
_stride_of: Callable[[torch.Tensor], tuple[int, ...]] = _TENSOR.stride


@dataclass
class Flat:
    """Gradients (``pieces``, in the parameters' memory layouts) and buffers in one tensor."""

    tensor: torch.Tensor
    pieces: list[torch.Tensor]


@dataclass
class Contribution:
    #: By parameter (this rank's part of it); None: no shard has one.
    gradients: list[torch.Tensor | None]
    buffers: torch.Tensor  #: a row of :class:`~parsl_freetrain.training.steps.buffers.Buffers`
    flat: Flat | None = None  #: memory that some of it, or all of it, is in

    @property
    def present(self) -> list[torch.Tensor]:
        return [gradient for gradient in self.gradients if gradient is not None]


class ShardSums:
    """Adds up gradients as backward() has left them; for exchanges they are copied into one flat
    tensor. Sums have at least single precision, so that those of half precision lose none.
    ``parameters``: frozen or not, as others may unfreeze some in their micro-batches.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        models: Iterable[torch.nn.Module],
        device: torch.device,
        ranks: int = 1,
    ) -> None:
        self.parameters = tuple(parameters)
        self._parts = [real(local(parameter.detach())) for parameter in self.parameters]
        dtype = reduce(torch.promote_types, (p.dtype for p in self._parts), torch.float32)
        self.buffers = Buffers(models, dtype)
        self._dtype, self._device = self.buffers.dtype, device
        self._divided = any(map(is_divided, parameters))
        self._sizes = [part.numel() for part in self._parts]
        self._elements = sum(self._sizes)
        self._used = self._elements + self.buffers.row_size
        self.flat_size = -(-self._used // ranks) * ranks
        # Optimizers want gradients in their parameters' memory layout.
        self._strides = [torch.empty_like(part, device='meta').stride() for part in self._parts]
        # Fresh memory of this size costs as much as an addition: it is used again.
        self._spare: list[Flat] = []
        self._rows: list[torch.Tensor] = []
        self._nothing = self._fresh(0)
        self._factors: dict[float, torch.Tensor] = {}
        self._added = 0
        kinds = {(type(p), p.dtype, getattr(p, 'grad_dtype', p.dtype)) for p in parameters}
        self._plain = kinds <= {(torch.nn.Parameter, self._dtype, self._dtype)}

    def empty(self) -> Contribution:
        """A contribution without gradients; :meth:`put` and :meth:`put_buffers` fill it."""
        return Contribution([None] * len(self.parameters), self._nothing)

    def put(
        self,
        into: Contribution,
        indices: range,
        gradients: Sequence[torch.Tensor | None],
        weight: float,
    ) -> None:
        """Enter the gradients of some parameters, which are its own from now on, times a weight."""
        given, kinds = gradients, {(self._dtype, _STRIDED)}
        plain = self._plain or (not self._divided and self._kinds(given) == kinds)
        if not plain or in_graphs():
            given = self._made_plain(into, indices, given)
        into.gradients[indices.start : indices.stop] = given
        if weight != 1:
            self.scale([gradient for gradient in given if gradient is not None], weight)

    def _made_plain(
        self, into: Contribution, indices: range, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Gradients of other kinds, or of parameters that are divided, as tensors to be added."""
        plain, others = [*gradients], []
        for place, (i, gradient) in enumerate(zip(indices, gradients, strict=True)):
            if gradient is None:
                continue
            if gradient.layout is not _STRIDED:
                raise BadInput(_SPARSE)
            own = plain[place] = real(local(gradient).detach())
            if own.dtype is not self._dtype or in_graphs():
                into.flat = into.flat or self.memory()
                plain[place] = into.flat.pieces[i]
                others.append((into.flat.pieces[i], own))
        copy_all(*zip(*others, strict=True)) if others else None
        return plain

    @staticmethod
    def _kinds(gradients: Iterable[torch.Tensor | None]) -> set[tuple[torch.dtype, torch.layout]]:
        return {(one.dtype, one.layout) for one in gradients if one is not None}

    def put_buffers(self, into: Contribution, weight: float) -> None:
        if not self.buffers.row_size:
            return
        into.buffers = self._rows.pop() if self._rows else self._fresh(self.buffers.row_size)
        self.buffers.enter(into.buffers, weight)

    def plus(self, earlier: Contribution, later: Contribution) -> Contribution:
        """Add the contribution of later shards to that of earlier ones, and return it."""
        ours, theirs, single = earlier.present, later.present, []
        if not len(ours) == len(theirs) == len(self.parameters):
            ours, theirs = [], []
            for i, (one, other) in enumerate(zip(earlier.gradients, later.gradients, strict=True)):
                if one is not None and other is not None:
                    ours.append(one)
                    theirs.append(other)
                elif (only := one if one is not None else other) is not None:
                    earlier.gradients[i] = only
                    single.append(only)
        if ours:
            self._added = n = self._added + 1
            refuse_overwritten(ours, theirs, n % len(ours) if n & (n - 1) else None)
            torch._foreach_add_(ours, theirs)
        if single:
            # As where a rank sends zeros for it: -0.0 becomes 0.0.
            torch._foreach_add_(single, 0.0)
        if self.buffers.row_size:
            earlier.buffers.add_(later.buffers)
        if not single:
            self.release(later)
        return earlier

    def release(self, contribution: Contribution) -> None:
        if contribution.flat is not None:
            self._spare.append(contribution.flat)
        if contribution.buffers.numel():
            self._rows.append(contribution.buffers)

    def memory(self) -> Flat:
        return self._spare.pop() if self._spare else self._in_pieces(self._fresh(self.flat_size))

    def _fresh(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def pack(self, contribution: Contribution) -> Flat:
        """Gradients and buffers in one tensor, with zeros where there is no gradient."""
        flat = contribution.flat = contribution.flat or self.memory()
        pairs = list(zip(flat.pieces, contribution.gradients, strict=True))
        outside = [(piece, g) for piece, g in pairs if g is not None and g is not piece]
        copy_all([piece for piece, _ in outside], [gradient for _, gradient in outside])
        if zeros := [piece for piece, gradient in pairs if gradient is None]:
            torch._foreach_zero_(zeros)
        if self.buffers.row_size:
            flat.tensor[self._elements : self._used].copy_(contribution.buffers)
        if self.flat_size > self._used:
            flat.tensor[self._used :].zero_()
        return flat

    def unpack(self, flat: Flat, present: Sequence[int]) -> Contribution:
        kept = zip(flat.pieces, present, strict=True)
        gradients = [piece if there else None for piece, there in kept]
        return Contribution(gradients, flat.tensor[self._elements : self._used], flat)

    def scale(self, gradients: list[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
        """Multiply gradients by a factor; a number that is 0 if all are finite. In other types than
        single precision, it may be another one where they are large. Nothing is read. Raises
        BadInput if one is sparse.
        """
        bad = torch.zeros((), device=self._device)
        if not gradients:
            return bad
        if {layout for _, layout in self._kinds(gradients)} != {_STRIDED}:
            raise BadInput(_SPARSE)
        if self._dtype is torch.float32 and self._device.type in ('cpu', 'cuda'):
            # What gradient scalers do, in one operation.
            if factor not in self._factors:
                self._factors[factor] = torch.full((), factor, device=self._device)
            both = bad, self._factors[factor]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, *both)
            return bad
        if factor != 1:
            torch._foreach_mul_(gradients, factor)
        norms = torch._foreach_norm(gradients, dtype=torch.float64)
        return torch.stack(norms).sum().isfinite().logical_not()

    def mean(self, total: Contribution, factor: float) -> torch.Tensor:
        if self.buffers.row_size and total.buffers.numel() and factor != 1:
            total.buffers.mul_(factor)
        return self.scale(total.present, factor)

    def give(self, total: Contribution, indices: Iterable[int] | None = None) -> None:
        """Set the gradients of parameters to the sums, or to None where no shard had one."""
        if self._plain and indices is None:
            given = [one is not None for one in total.gradients]
            if list(map(_stride_of, total.present)) == list(compress(self._strides, given)):
                deque(map(set_grad, self.parameters, total.gradients), 0)
                return
        found = enumerate(total.gradients)
        gradients = dict(found if indices is None else ((i, total.gradients[i]) for i in indices))
        others: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        for i, one in gradients.items():
            dtype, strides = self._parts[i].dtype, self._strides[i]
            if one is not None and (one.dtype, one.stride()) != (dtype, strides):
                others.append(one)
                laid = torch.empty_strided(one.shape, strides, dtype=dtype, device=self._device)
                copies.append(laid)
                gradients[i] = laid
        copy_all(copies, others)
        for i, gradient in gradients.items():
            parameter = self.parameters[i]
            if self._divided and gradient is not None:
                gradient = divided_like(gradient, parameter)
            if gradient is not None and parameter.is_complex():
                gradient = torch.view_as_complex(gradient)
            parameter.grad = gradient

    def _in_pieces(self, flat: torch.Tensor) -> Flat:
        pieces = flat[: self._elements].split(self._sizes)
        each = zip(pieces, self._parts, self._strides, strict=True)
        return Flat(flat, [p.as_strided(q.shape, s, p.storage_offset()) for p, q, s in each])
