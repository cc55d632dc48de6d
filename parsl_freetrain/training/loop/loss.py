"""How the gradients of parts of a global batch are added up: what ``ctx.loop(loss=...)`` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.data.loader import MicroBatch

Loss = Literal['mean', 'sum'] | Callable[[Any], float]
_REDUCTIONS = ('none', 'mean', 'sum')
_LINEAR = {'Add', 'Sub', 'Mul', 'Neg', 'Squeeze', 'View', 'Alias', 'ToCopy'}
_ELEMENTWISE = {'Pow', 'Abs', 'Exp', 'Log', 'Sqrt', 'Clamp', 'Where', 'Sum', 'MaskedFill', 'Cat'}
_ELEMENTWISE |= {*_LINEAR, 'Unsqueeze', 'Stack'}


def check(loss: Loss | None, *, plain: bool) -> None:
    """Raises BadInput if it is none, or no mean and ranks hold parts of models (not ``plain``)."""
    if loss not in (None, 'mean', 'sum') and not callable(loss):
        refuse('The loss given to ctx.loop', loss, "'mean', 'sum', or a function of the batch")
    if loss not in (None, 'mean') and not plain:
        raise BadInput(
            "ctx.loop was given a loss that is not 'mean', but models are divided among ranks or "
            'combined by Adasum, which take the mean over samples: let the loss be a mean.'
        )


def with_shares(
    loss: Loss | None, micro_batches: Sequence[MicroBatch], loaded: Iterator[Any], peers: Peers
) -> Iterator[tuple[MicroBatch, Any]]:
    """Micro-batches with their shares of the gradient, and data. All ranks call this together."""
    if not callable(loss):
        for one in micro_batches:
            share = float(one.weight > 0) if loss == 'sum' else None
            yield replace(one, share=share) if share is not None else one, next(loaded)
        return
    data = [next(loaded) for _ in micro_batches]
    counts = [
        float(loss(batch)) if one.weight else 0.0
        for one, batch in zip(micro_batches, data, strict=True)
    ]
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        raise BadInput(f'The function given to ctx.loop as loss returned {counts}: not a count.')
    said = gather_bytes(peers, msgspec.msgpack.encode(counts))
    every = [count for one in said for count in msgspec.msgpack.decode(one, type=list[float])]
    total = math.fsum(every) or 1.0
    for one, count, batch in zip(micro_batches, counts, data, strict=True):
        yield replace(one, share=count / total), batch


def refuse_sum(loss: Any) -> None:
    """Raises BadInput if a loss is plainly a sum over its samples."""
    if isinstance(loss, torch.Tensor) and _kinds(loss.grad_fn) == {'sum'}:
        raise BadInput(
            'The loss in the body of ctx.loop is a sum over samples, and each part of a global '
            'batch counts with its share of the samples, as is right for a mean: say ctx.loop(..., '
            "loss='sum'), so that the parts are added up (or loss='mean', if it is a mean)."
        )


def _kinds(node: Any, depth: int = 0) -> set[str]:
    """What the terms of a loss are: 'mean', 'sum', or 'other'."""
    if depth > 50:
        return {'other'}
    name = node.name() if node is not None else ''
    reduction = getattr(node, '_saved_reduction', None)
    if reduction is not None:
        return {_REDUCTIONS[reduction] if reduction in (1, 2) else 'other'}
    below = [one for one, _ in node.next_functions if one is not None] if node is not None else []
    below = [one for one in below if 'AccumulateGrad' not in one.name()]
    if name.startswith('SumBackward'):
        return {'other'} if any(_has_mean(one) for one in below) else {'sum'}
    passes = name.removesuffix('0').removesuffix('1').removesuffix('Backward')
    if below and passes in _LINEAR:
        return set().union(*(_kinds(one, depth + 1) for one in below))
    return {'mean' if name.startswith('MeanBackward') else 'other'}


def _has_mean(node: Any, depth: int = 0) -> bool:
    """Whether a mean is among what a sum adds up, apart from layers."""
    name = node.name()
    mean = name.startswith(('MeanBackward', 'DivBackward'))
    if mean or getattr(node, '_saved_reduction', 0) == 1 or depth > 50:
        return True
    if name.rstrip('01').removesuffix('Backward') not in _ELEMENTWISE:
        return False
    return any(_has_mean(one, depth + 1) for one, _ in node.next_functions if one is not None)
