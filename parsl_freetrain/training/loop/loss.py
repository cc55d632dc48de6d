"""How the gradients of parts of a global batch are added up: what ``ctx.loop(loss=...)`` says."""

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
_NORMS = {'Sum', 'Mean', 'LinalgVectorNorm', 'Norm'}


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


def refuse_wrong(loss: Any, batch: Any, said: Loss | None, *, own: bool = True) -> None:
    """Raises BadInput if a loss is plainly not what ``ctx.loop`` was told: a sum over the samples
    of a batch, or a mean by weights where the loop is the user's ``own``; or a penalty in a sum.
    """
    sizes, graph = _sizes(batch), getattr(loss, 'grad_fn', None)
    terms = {_kind(node, sizes, numbers) for node, numbers in _terms(graph)}
    if said is None and terms == {'sum'}:
        raise BadInput(
            'The loss in the body of ctx.loop is a sum over samples, and each part of a global '
            'batch counts with its share of the samples, as is right for a mean: say ctx.loop(..., '
            "loss='sum'), so that the parts are added up (or loss='mean', if it is a mean). One "
            'that is divided by a fixed number, and not by the samples that the body got, is a sum.'
        )
    if own and said is None and 'weighted' in terms:
        raise BadInput(
            'The loss in the body of ctx.loop is a mean by the weights of classes (F.cross_entropy '
            'with weight), and each part of a global batch counts with its share of the samples: '
            'say ctx.loop(..., loss=lambda batch: weight[batch[1]].sum()), by the labels, so that '
            "it counts with its weights (or loss='mean', if that difference is small)."
        )
    if said == 'sum' and 'penalty' in terms:
        raise BadInput(
            "ctx.loop was given loss='sum', but a part of the loss depends on weights alone, and "
            'would be added once for each part of a global batch: let the optimizer do it '
            "(weight_decay), or make the loss a mean over samples and leave out loss='sum'."
        )


def _sizes(batch: Any) -> set[int]:
    """How long what belongs to the samples may be: the tensors of a batch, or their dimensions in
    one. A sum over anything else, such as points of an equation, is none over samples.
    """
    found = [one for _, each in inside({'': [batch]}) for _, one in parts_of(each)]
    shapes = [one.shape for one in found if isinstance(one, torch.Tensor)]
    return {size for shape in shapes for size in accumulate(shape, mul)}


def _terms(graph: Any) -> Iterator[tuple[Any, tuple[float, ...]]]:
    """What is added up in a loss, each node once, and the numbers that multiply it."""
    seen, waiting = set[Any](), [(graph, tuple[float, ...]())]
    for node, numbers in waiting:
        if node is not None and node not in seen:
            seen.add(node)
            if not (more := _numbers(node)) and _operation(node) not in _LINEAR:
                yield node, numbers
            else:
                waiting += [(below, numbers + more) for below, _ in node.next_functions]


def _numbers(node: Any) -> tuple[float, ...]:
    """The plain number by which it multiplies, if there is one."""
    factor, divides = getattr(node, '_saved_other', None), _operation(node) == 'Div'
    if isinstance(factor, torch.Tensor):
        # What was counted in the batch keeps its type; a number of Python's has none.
        small = torch.tensor(1, dtype=torch.half if factor.is_floating_point() else torch.int8)
        plain = factor.numel() == 1 and factor.device.type == 'cpu'
        counted = divides and torch.result_type(factor, small) != small.dtype
        factor = float(factor) if plain and not counted else None
    if factor is None or not (divides or _operation(node) == 'Mul'):
        return ()
    return (1 / (factor or math.inf) if divides else factor,)


def _kind(node: Any, sizes: set[int], numbers: Sequence[float]) -> str:
    """What a term is: a 'mean', one by weights ('weighted'), 'sum', 'penalty' (of weights alone),
    or 'other'.
    """
    operation, reduction = _operation(node), getattr(node, '_saved_reduction', None)
    if reduction is not None:
        classes = getattr(node, '_saved_weight', None) if operation.startswith('NllLoss') else None
        if reduction == 1:
            return 'mean' if classes is None or len(classes.unique()) == 1 else 'weighted'
        return _divided(node._saved_self.shape, sizes, numbers) if reduction == 2 else 'other'
    added = [*_walk(node, lambda one: one is node or _operation(one) in _ELEMENTWISE)]
    ends = [one for one in added[1:] if _operation(one) not in _ELEMENTWISE]
    weights = [one.variable.shape for one in ends if hasattr(one, 'variable')]
    shapes = [one._saved_self_sym_sizes for one in added if _operation(one) == 'Sum']
    of_samples = [one for one in shapes if _is_over(one, sizes) and one not in weights]
    if operation in _NORMS and ends and not of_samples and len(ends) == len(weights):
        return 'penalty'
    means = [one for one in added if _operation(one) in ('Mean', 'Div')]
    means += [one for one in added if getattr(one, '_saved_reduction', 0) == 1]
    if operation == 'Sum' and of_samples and not means:
        return _divided(of_samples[0], sizes, numbers)
    return 'mean' if operation == 'Mean' else 'other'


def _divided(shape: Sequence[int], sizes: set[int], numbers: Sequence[float]) -> str:
    """What a sum over a shape is, times numbers: a mean if some of them divide by its samples."""
    products = [1.0]
    for number in numbers[:8]:
        products += [number * product for product in products]
    lengths = [size for size in (*accumulate(shape, mul), *sizes) if size > 1 or 1.0 in numbers]
    means = any(math.isclose(one * size, 1) for one in products for size in lengths)
    return 'other' if not _is_over(shape, sizes) else 'mean' if means else 'sum'


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
