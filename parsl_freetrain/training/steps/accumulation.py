"""Gradient accumulation: several forward and backward passes of a rank for one optimizer step."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import Parameter, signature
from types import MethodType
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of
from parsl_freetrain.training.steps import gradient_guard, scaling

_BUCKET_BYTES = 2**25
UNUSED = (
    'An iteration of ctx.loop ended with gradients that were not used; the end of a fragment would '
    'drop them: call optimizer.step() once in every iteration (to accumulate the gradients of n '
    'batches say ctx.loop(..., accumulate=n)), or optimizer.zero_grad() where a step is left out.'
)
OF_A_MICRO_BATCH = 'With micro_batch it is the gradient of a micro-batch there'


class Accumulation:
    """Adds up the gradients of micro-batches, and steps optimizers and schedulers in the last one.
    Each ``step()`` takes its gradients away, so ``zero_grad`` has no effect on the sum. ``combine``
    adds up all ranks' sums in place. BadInput for optimizers of several losses.
    """

    def __init__(
        self,
        prepared: Prepared,
        combine: Callable[[Sequence[torch.nn.Parameter]], None],
        scalers: Sequence[scaling.ScalerOnce],
    ) -> None:
        for optimizer in prepared.optimizers:
            if computes_loss(optimizer):
                raise BadInput(
                    f'ctx.loop was given micro_batch, but {type(optimizer).__name__} computes the '
                    'loss several times in a step: leave out micro_batch, or use another optimizer.'
                )
        self._combine, self._prepared, self._scalers = combine, prepared, scalers
        self._micro_batches = self._micro_batch = 1
        self.on = False
        self._share = self._weight = 1.0
        self._sums: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        self._values: dict[int, list[tuple[float, float]]] = {}
        self._guard = gradient_guard.GradientGuard(
            (p for optimizer in prepared.optimizers for p in parameters_of(optimizer)),
            OF_A_MICRO_BATCH,
        )
        for number, optimizer in enumerate(prepared.optimizers):
            step = MethodType(self._in_last_micro_batch(optimizer, number), optimizer)
            optimizer.step = step  # type: ignore[method-assign]
        for number, scheduler in enumerate(prepared.schedulers):
            # A scheduler's attributes are its state, which is saved, so the method is its class's.
            kind = type(scheduler)
            own = {'step': self._once(scheduler.step, number), '__module__': kind.__module__}
            scheduler.__class__ = type(kind.__name__, (kind,), own)

    def begin(self, micro_batches: int) -> None:
        """Call before a global batch. Until one has several micro-batches, nothing is changed."""
        self._micro_batches, self._micro_batch = micro_batches, 0
        # From then on: DDP takes what passes without exchange used for used in the next pass.
        self.on |= micro_batches > 1

    @property
    def at_last(self) -> bool:
        return self._micro_batch == self._micro_batches

    def begin_micro_batch(self, share: float, weight: float) -> None:
        """Call before a micro-batch, with its share of the samples and its gradients' factor."""
        self._micro_batch += 1
        self._share, self._weight = share, weight
        self._stepped = set()
        self._guard.begin_micro_batch(self.on)
        for scaler in self._scalers if self.on else ():
            scaler.waits, scaler.updated = True, False

    def end_micro_batch(self) -> None:
        self._guard.end_micro_batch()
        for scaler in self._scalers if self.on else ():
            scaler.waits = False
            if scaler.updated and self.at_last:
                scaler.update()
        for number, optimizer in enumerate(self._prepared.optimizers if self.on else ()):
            unused = any(
                id(p) in self._sums if self.at_last else p.grad is not None
                for p in parameters_of(optimizer)
            )
            if unused and number not in self._stepped:
                raise BadInput(
                    'An iteration of ctx.loop ended with gradients that were not used. With '
                    'micro_batch, the body of the loop runs once per micro-batch: call '
                    'optimizer.step() once in each.'
                )

    def _in_last_micro_batch(self, optimizer: Any, number: int) -> Callable[..., Any]:
        plain = optimizer.step

        def step(optimizer: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            scaler = scaling.stepping(self._scalers)
            if not self.on or (scaler is not None and not scaler.waits):
                return plain(closure, **options) if closure is not None else plain(**options)
            if number in self._stepped:
                raise BadInput(
                    'optimizer.step() was called twice in one iteration of ctx.loop: with '
                    'micro_batch, call it once in every iteration.'
                )
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._stepped.add(number)
            parameters = parameters_of(optimizer)
            self._guard.check(parameters)
            self._take(parameters)
            if self.at_last:
                # Optimizers choose their kernels by the parameters' class.
                self._guard.end_micro_batch()
                for parameter in parameters:
                    parameter.grad = self._sums.pop(id(parameter), None)
                self._combine(parameters)
                last = plain if scaler is None else partial(scaler.step_now, optimizer)
                last(**options)
            return loss

        return step

    @torch.no_grad()
    def _take(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        found: list[tuple[int, torch.Tensor]] = []
        for parameter in parameters:
            if (gradient := gradient_guard.grad_of(parameter)) is None:
                continue
            gradient_guard.set_grad(parameter, None)
            if gradient.layout is not torch.strided:
                raise BadInput(
                    'ctx.loop was given micro_batch, which cannot add up sparse gradients: make '
                    'the embedding with sparse=False, or leave out micro_batch.'
                )
            found.append((id(parameter), gradient))
        taken = [gradient for _, gradient in found]
        if taken and gradient_guard.in_graphs():
            taken = list(torch._foreach_mul(taken, 1.0))
        if taken and self._weight:
            torch._foreach_mul_(taken, self._weight)
        elif taken:
            torch._foreach_zero_(taken)  # 0 x inf is not 0
        sums = [self._sums.setdefault(i, own) for (i, _), own in zip(found, taken, strict=True)]
        both = [(one, own) for one, own in zip(sums, taken, strict=True) if one is not own]
        if both:
            known, added = map(list, zip(*both, strict=True))
            gradient_guard.refuse_overwritten(known, added)
            torch._foreach_add_(known, added)

    def _once(self, plain: Callable[..., Any], number: int) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            if not self.on:
                plain(*args, **kwargs)
                return
            # The mean over the samples of this rank of what ReduceLROnPlateau takes.
            seen = self._values.setdefault(number, [])
            seen += [(self._share, float(value)) for value in (*args, *kwargs.values())]
            if self.at_last:
                total = sum(share for share, _ in seen)
                mean = [sum(share * value for share, value in seen) / total] if total else []
                plain(*(mean or args))
                seen.clear()

        return step


def refuse_accumulation_of_accelerate() -> None:
    """Its Accelerator would divide each loss, and leave the rest to optimizers that it prepares."""
    states = sys.modules.get('accelerate.state')
    steps = states.GradientState().num_steps if states and states.GradientState._shared_state else 1
    if steps > 1:
        raise BadInput(
            f'An Accelerator has gradient_accumulation_steps={steps}, and would divide every loss '
            f'by it: leave it out there, and say ctx.loop(..., accumulate={steps}).'
        )


def computes_loss(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step needs a closure, by which it computes the loss several times."""
    closure = signature(optimizer.step).parameters.get('closure')
    return closure is not None and closure.default is Parameter.empty


def weigh(gradient: torch.Tensor, weight: float) -> None:
    if weight:
        gradient.mul_(weight)
    else:
        gradient.zero_()  # 0 x inf is not 0


def buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of tensors of one type, in order, of up to 32 MB, to be exchanged together."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
