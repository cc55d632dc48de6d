"""How the gradients of parts of a global batch are added up: what ``ctx.loop(loss=...)`` says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from operator import mul
from typing import Any, Literal

import torch

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.training.comm.peers import Peers, gather
from parsl_freetrain.training.data.inside import inside, parts_of
from parsl_freetrain.training.data.loader import MicroBatch

Loss = Literal['mean', 'sum'] | Callable[[Any], float]
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
            share, batch = float(one.weight > 0) if loss == 'sum' else None, next(loaded)
            if loss is None and 0 < one.weight < 1:
                _refuse_left_out(batch, len(one.indices))
            yield replace(one, share=share) if share is not None else one, batch
        return
    data = [next(loaded) for _ in micro_batches]
    counts = [
        float(loss(batch)) if one.weight else 0.0
        for one, batch in zip(micro_batches, data, strict=True)
    ]
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        raise BadInput(f'The function given to ctx.loop as loss returned {counts}: not a count.')
    total = math.fsum(chain(*gather(peers, counts, list[float]))) or 1.0
    for one, count, batch in zip(micro_batches, counts, data, strict=True):
        yield replace(one, share=count / total), batch


def _refuse_left_out(batch: Any, samples: int) -> None:
    """Raises BadInput if all tensors of a batch plainly have fewer rows than it has samples."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if isinstance(first, torch.Tensor) and first.shape[:1] >= (samples,):
        return
    tensors = [one for _, one in [('', batch), *parts_of(batch)] if isinstance(one, torch.Tensor)]
    rows = {len(one) for one in tensors if one.dim()}
    if len(rows) == 1 and samples > (left := rows.pop()):
        raise BadInput(
            f'A batch of {samples} samples has {left} rows: if collate_fn leaves samples out, each '
            'part of a global batch would count by the samples that it had. Leave them out by a '
            'sampler or in the dataset, or say ctx.loop(..., loss=lambda batch: rows that count), '
            "or loss='mean' if a row is made of several samples."
        )


def refuse_sum(loss: Any, batch: Any) -> None:
    """Raises BadInput if a loss is plainly a sum over the samples of a batch."""
    sizes, graph = _sizes(batch), getattr(loss, 'grad_fn', None)
    terms = {_kind(one, sizes) for one in _walk(graph, lambda node: not _kind(node, sizes))}
    if terms - {''} == {'sum'}:
        raise BadInput(
            'The loss in the body of ctx.loop is a sum over samples, and each part of a global '
            'batch counts with its share of the samples, as is right for a mean: say ctx.loop(..., '
            "loss='sum'), so that the parts are added up (or loss='mean', if it is a mean)."
        )


def _sizes(batch: Any) -> set[int]:
    """How long what belongs to the samples may be: the tensors of a batch, or their dimensions in
    one. A sum over anything else, such as points of an equation, is none over samples.
    """
    found = [one for _, each in inside({'': [batch]}) for _, one in parts_of(each)]
    shapes = [one.shape for one in found if isinstance(one, torch.Tensor)]
    return {size for shape in shapes for size in accumulate(shape, mul)}


def _kind(node: Any, sizes: set[int]) -> str:
    """What a term of a loss is: 'mean', 'sum', or 'other'; empty: it only passes on others."""
    operation, reduction = _operation(node), getattr(node, '_saved_reduction', None)
    if reduction is not None:
        of_samples = reduction == 2 and _is_over(node._saved_self.shape, sizes)
        return 'mean' if reduction == 1 else 'sum' if of_samples else 'other'
    if operation == 'Sum':
        added = [*_walk(node, lambda one: _operation(one) in _ELEMENTWISE)]
        weights = [one.variable.shape for one in added if hasattr(one, 'variable')]
        shapes = [one._saved_self_sym_sizes for one in added if _operation(one) == 'Sum']
        of_samples = any(_is_over(one, sizes) and one not in weights for one in shapes)
        return 'other' if any(map(_is_mean, added)) or not of_samples else 'sum'
    factor: Any = getattr(node, '_saved_other', None) if operation == 'Mul' else None
    plain = isinstance(factor, (int, float))
    if isinstance(factor, torch.Tensor):
        plain = factor.numel() == 1 and factor.device.type == 'cpu'
    if plain and any(math.isclose(float(factor) * size, 1) for size in sizes - {1}):
        return 'mean'
    return '' if operation in _LINEAR else 'mean' if operation == 'Mean' else 'other'


def _is_mean(node: Any) -> bool:
    return _operation(node) in ('Mean', 'Div') or getattr(node, '_saved_reduction', 0) == 1


def _is_over(shape: Sequence[int], sizes: set[int]) -> bool:
    return not sizes or (len(shape) > 0 and shape[0] in sizes)


def _operation(node: Any) -> str:
    return str(node.name()).rstrip('01').removesuffix('Backward')


def _walk(node: Any, passes: Callable[[Any], bool]) -> Iterator[Any]:
    """A graph from a node on, below those that pass on others: each node once."""
    seen, waiting = set[Any](), [node]
    for one in waiting:
        if one is not None and one not in seen:
            seen.add(one)
            yield one
            waiting += [below for below, _ in one.next_functions] if passes(one) else []
