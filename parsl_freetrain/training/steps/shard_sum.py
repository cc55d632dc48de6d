"""The contribution of a virtual shard to a global batch, as flat tensors that can be added and
sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch.utils import deterministic

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import divided_like, local

_SETTING: Any = deterministic  # torch makes its attributes at run time


@dataclass
class Contribution:
    """Sums over some shards.

    Attributes
    ----------
    sums
        One flat tensor; :class:`Layout` says what is where.
    firsts
        Bytes of the integer buffers of the first shard that is not empty. Integers are not added.
    finite
        Whether all gradients are finite, once that is known.
    """

    sums: torch.Tensor
    firsts: torch.Tensor
    finite: bool | None = None


class Layout:
    """The layout of :attr:`Contribution.sums`.

    In order: weighted gradients; weighted floating-point buffers; for each parameter the number of
    shards that have a gradient; for each such buffer the number of shards that changed it; for each
    optimizer the number of shards that stepped it; for each scheduler the number of shards that
    stepped it, the weight of those that did so with a value, and the weighted sum of these values.
    Zeros fill it up to a multiple of ``ranks``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Sequence[torch.Tensor],
        integers: Sequence[torch.Tensor],
        optimizers: int,
        schedulers: int,
        device: torch.device,
        ranks: int = 1,
    ) -> None:
        self.parameters = tuple(parameters)
        self.buffers = tuple(buffers)
        self.integers = tuple(integers)
        self._device = device
        # At least float32, so that sums of half precision gradients lose no precision.
        self._dtype = reduce(
            torch.promote_types, (tensor.dtype for tensor in (*parameters, *buffers)), torch.float32
        )
        if self._dtype.is_complex:
            raise BadInput(
                'Reproducible mode cannot add up complex gradients: use throughput mode '
                'for a model with complex parameters.'
            )
        self._starts = [0]
        for tensor in (*self.parameters, *self.buffers):
            self._starts.append(self._starts[-1] + local(tensor).numel())
        at = self._starts[-1]
        ends = []
        for count in (
            len(self.parameters),
            len(self.buffers),
            optimizers,
            schedulers,
            schedulers,
            schedulers,
        ):
            ends.append((at, at + count))
            at += count
        self._has_grad, self._changed, self._opt, self._sched, self._with_value, self._values = ends
        self._size = -(-at // ranks) * ranks
        # Fresh memory of this size costs as much as an addition: it is used again.
        self._spare: list[torch.Tensor] = []
        self._first_bytes = [tensor.numel() * tensor.element_size() for tensor in self.integers]

    def empty(self) -> Contribution:
        """A contribution which the other methods fill; :meth:`put_missing` comes last."""
        sums = self._spare.pop() if self._spare else self._fresh()
        sums[self._starts[len(self.parameters)] :].zero_()
        return Contribution(sums, torch.zeros(0, dtype=torch.uint8, device=self._device))

    def _fresh(self) -> torch.Tensor:
        # Deterministic torch fills what is empty; here all of it is written.
        fills = _SETTING.fill_uninitialized_memory
        _SETTING.fill_uninitialized_memory = False
        try:
            return torch.empty(self._size, dtype=self._dtype, device=self._device)
        finally:
            _SETTING.fill_uninitialized_memory = fills

    def plus(self, earlier: Contribution, later: Contribution) -> Contribution:
        """Add the contribution of later shards to that of earlier ones, and return it."""
        earlier.sums.add_(later.sums)
        earlier.finite = None
        self.release([later])
        return earlier

    def release(self, contributions: Iterable[Contribution]) -> None:
        """Use their memory for others."""
        self._spare.extend(contribution.sums for contribution in contributions)

    def firsts_of(self, contributions: Sequence[Contribution]) -> torch.Tensor:
        """The bytes of the integer buffers in the first contribution; zeros if there is none."""
        if contributions:
            return contributions[0].firsts
        return torch.zeros(sum(self._first_bytes), dtype=torch.uint8, device=self._device)

    def put_gradient(self, into: Contribution, index: int, weight: float) -> None:
        """Enter the gradient of parameter ``index``, if there is one."""
        gradient = self.parameters[index].grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise BadInput(
                'Reproducible mode cannot add up sparse gradients: make the embedding '
                'with sparse=False, or use '
                'throughput mode.'
            )
        gradient = local(gradient)
        torch.mul(gradient.to(self._dtype), weight, out=self._piece(into, index, gradient.shape))
        into.sums[self._has_grad[0] + index] = 1

    def put_missing(self, into: Contribution) -> None:
        """Enter zeros for the parameters without a gradient."""
        for i, present in enumerate(into.sums[slice(*self._has_grad)].tolist()):
            if not present:
                into.sums[self._starts[i] : self._starts[i + 1]].zero_()

    def put_buffers(
        self, into: Contribution, before: Sequence[torch.Tensor], weight: float
    ) -> None:
        """Enter all buffers. ``before``: the floating-point buffers before the micro-batch."""
        for i, (buffer, old) in enumerate(zip(self.buffers, before, strict=True)):
            torch.mul(
                buffer.to(self._dtype),
                weight,
                out=self._piece(into, len(self.parameters) + i, buffer.shape),
            )
            # The weights add up to 1 only nearly, so an unchanged buffer would drift.
            into.sums[self._changed[0] + i] = not torch.equal(buffer, old)
        if self.integers:
            into.firsts = torch.cat(
                [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in self.integers]
            )

    def put_steps(
        self,
        into: Contribution,
        stepped: Sequence[bool],
        scheduled: Sequence[tuple[float | None, ...]],
        weight: float,
    ) -> None:
        """Enter which optimizers were stepped, and the calls of each scheduler's step, with a value
        or None.
        """
        for i, done in enumerate(stepped):
            into.sums[self._opt[0] + i] = done
        for i, calls in enumerate(scheduled):
            if not calls:
                continue
            into.sums[self._sched[0] + i] = 1
            if calls[-1] is not None:
                into.sums[self._with_value[0] + i] = weight
                into.sums[self._values[0] + i] = weight * calls[-1]

    def is_finite(self, contribution: Contribution) -> bool:
        """Whether all gradients in it are finite."""
        if contribution.finite is None:
            gradients = contribution.sums[: self._starts[len(self.parameters)]]
            # A sum is not finite if a term is not; it may also overflow when all terms are finite.
            contribution.finite = math.isfinite(float(gradients.sum())) or bool(
                torch.isfinite(gradients).all()
            )
        return contribution.finite

    def take_gradients(self, total: Contribution) -> None:
        """Set the parameters' gradients to the sums, or to None where no shard had one."""
        present = total.sums[slice(*self._has_grad)].tolist()
        for i, parameter in enumerate(self.parameters):
            own, gradient = local(parameter), None
            if present[i]:
                piece = self._piece(total, i, own.shape).to(own.dtype)
                if piece.stride() != own.stride():
                    # Fused optimizers need the parameter's memory layout.
                    piece = torch.empty_like(own).copy_(piece)
                gradient = divided_like(piece, parameter)
            parameter.grad = gradient

    def take_buffers(self, total: Contribution, before: Sequence[torch.Tensor]) -> None:
        """Set each buffer to the mean, or to its value before if no shard changed it; integer
        buffers to those of the first shard.
        """
        changed = total.sums[slice(*self._changed)].tolist()
        for i, (buffer, old) in enumerate(zip(self.buffers, before, strict=True)):
            buffer.copy_(
                self._piece(total, len(self.parameters) + i, buffer.shape) if changed[i] else old
            )
        at = 0
        for tensor, size in zip(self.integers, self._first_bytes, strict=True):
            tensor.copy_(
                total.firsts[at : at + size].clone().view(tensor.dtype).reshape(tensor.shape)
            )
            at += size

    def steps_in(self, total: Contribution) -> tuple[list[bool], list[tuple[float | None, ...]]]:
        """Which optimizers to step, and how to step each scheduler: () not at all, else (value,)
        with the mean of the values, or (None,) if there were none.
        """
        stepped = [count > 0 for count in total.sums[slice(*self._opt)].tolist()]
        counts, weights, values = (
            total.sums[slice(*place)].tolist()
            for place in (self._sched, self._with_value, self._values)
        )
        scheduled: list[tuple[float | None, ...]] = [
            () if not count else (value / weight if weight else None,)
            for count, weight, value in zip(counts, weights, values, strict=True)
        ]
        return stepped, scheduled

    def values(self, contribution: Contribution) -> torch.Tensor:
        """The weights and weighted sums of the values of schedulers' steps."""
        return contribution.sums[self._with_value[0] : self._values[1]]

    def _piece(self, contribution: Contribution, index: int, shape: torch.Size) -> torch.Tensor:
        return contribution.sums[self._starts[index] : self._starts[index + 1]].view(shape)
