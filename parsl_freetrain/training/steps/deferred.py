"""Optimizers and schedulers that act once per global batch; rates by samples, and scaled."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from itertools import count
from typing import Any

import torch
from torch._compile import _disable_dynamo

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of

_STRANGE_SCALER = (
    'An optimizer is stepped by a gradient scaler that was not given to ctx.prepare, so it would '
    'decide by a part of the global batch whether a step is taken: give it to ctx.prepare.'
)


class DeferredOptimizer:
    """In the user's loop, hands over gradients; the optimizer itself steps later."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hand_over: Callable[[], None],
        none_left: Callable[[], bool],
    ) -> None:
        self._optimizer, self._hand_over, self._none_left = optimizer, hand_over, none_left
        clear: Any = type(optimizer).zero_grad
        self._only_clears = clear is torch.optim.Optimizer.zero_grad

    @_disable_dynamo  # as torch's own zero_grad: a function that steps may be compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand over this micro-batch's gradient; BadInput if that was done already."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_over()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        if not (self._only_clears and self._none_left()):
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def __getattr__(self, name: str) -> Any:
        if name == '_step_supports_amp_scaling':  # only an enabled gradient scaler asks for it
            raise BadInput(_STRANGE_SCALER)
        if name == 'first_step':  # of SAM, before its second_step
            raise BadInput(several_times(self._optimizer))
        return getattr(self._optimizer, name)


class DeferredScheduler:
    """Stands for a scheduler in the user's loop; ``step()`` is done once, after the optimizer's."""

    def __init__(self, scheduler: Any, step: Callable[..., None]) -> None:
        self._scheduler, self.step = scheduler, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def number_in(values: Sequence[Any]) -> float | None:
    """What a scheduler's ``step`` got in the loop: None, or one number; else BadInput."""
    try:
        (value,) = values or (None,)
        return value if value is None or type(value) is int else float(value)
    except (TypeError, ValueError):
        raise BadInput(
            f'scheduler.step was called with {values!r}; in ctx.loop it takes one number at most.'
        ) from None


def watch_passes(prepared: Prepared, stepped: Callable[[int], bool]) -> Callable[[], None]:
    """With several optimizers, say once if a model passes a batch, with gradients, behind a step of
    its own, as for the second loss of a GAN. Call what is returned behind the first global batch.
    """
    hooks, several = list[Any](), len(prepared.optimizers) > 1
    owners = [set(map(id, parameters_of(one))) for one in prepared.optimizers]

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    def watch(model: torch.nn.Module, by: list[int]) -> None:
        def look(*_: object) -> None:
            if torch.is_grad_enabled() and any(map(stepped, by)):
                stop()
                print(
                    f'Note: a {type(model).__name__} is used behind step() of its optimizer in the '
                    'same iteration, and has its weights of before: in reproducible mode all '
                    'optimizers step behind the last virtual shard. Have the other network step '
                    'first, or use mode=Throughput(), where step() acts at once.'
                )

        hooks.append(model.register_forward_pre_hook(look))

    for model in prepared.models if several else ():
        own = set(map(id, model.parameters()))
        watch(model, [i for i, each in enumerate(owners) if each & own])
    return stop


def several_times(optimizer: torch.optim.Optimizer) -> str:
    return (
        f'ctx.prepare was given {type(optimizer).__name__}, which computes the loss '
        'several times in a step, and reproducible mode has one gradient for it: use '
        'mode=Throughput(), or another optimizer.'
    )


def step_once(optimizer: torch.optim.Optimizer, by: torch.amp.GradScaler | None) -> None:
    """Step an optimizer (``by`` a scaler, unless it has seen an infinity); BadInput if one that is
    not torch's asks for a second pass.
    """
    step: Callable[..., Any] = optimizer.step if by is None else partial(by.step, optimizer)
    own = type(optimizer).__module__.startswith('torch.')
    if own or 'closure' not in signature(optimizer.step).parameters:
        step()
        return
    own_ones = [p for group in optimizer.param_groups for p in group['params']]
    calls, before = count(1), [(p._version, p.grad) for p in own_ones]

    def closure() -> None:
        kept = [p._version == v and p.grad is g for p, (v, g) in zip(own_ones, before, strict=True)]
        if next(calls) > 1 or not all(kept):
            raise BadInput(several_times(optimizer))

    step(closure)


def scale_steps(optimizers: Iterable[torch.optim.Optimizer], factor: Callable[[], float]) -> None:
    """Multiply the learning rate by ``factor()`` during every step, not in between."""
    kept: dict[int, list[Any]] = {}

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        times = factor()
        kept[id(optimizer)] = [group['lr'] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group['lr'] = group['lr'] * times

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group, lr in zip(optimizer.param_groups, kept.pop(id(optimizer)), strict=True):
            group['lr'] = lr

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
