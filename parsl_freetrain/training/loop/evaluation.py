"""A model is evaluated on a dataset, divided among ranks, with the same figures for any number."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import gather
from parsl_freetrain.training.data.loader import MicroBatch, make_loader, size_of, to_device
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.data.own_generators import as_before, own_generators
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.steps.mesh import Division

Measure = Callable[[torch.nn.Module, Any], Mapping[str, Any]]
_Sums = dict[str, tuple[float, float]]  # by metric: sum and number


def evaluate(
    model: torch.nn.Module,
    data: LoaderData,
    measure: Measure,
    rank: RankParts,
    division: Division,
    after_batch: Callable[[], None],
    gradients: bool = False,
) -> dict[str, float]:
    """The mean of each metric over all samples, for any number of ranks, which all call this."""
    part, parts, device = division.data_rank, division.parts, rank.device
    size = size_of(data.dataset)
    if size < 1 or data.batch_size < 1:
        raise BadInput(
            f'ctx.evaluate was given {size} samples and a batch size of {data.batch_size}; both '
            'must be at least 1.'
        )
    batches = [
        tuple(range(start, min(start + data.batch_size, size)))
        for start in range(0, size, data.batch_size)
    ]
    # A rank without a batch in the last round repeats one: the model may need all ranks.
    mine = [
        first + part if first + part < len(batches) else part % len(batches)
        for first in range(0, len(batches), parts)
    ]
    micro_batches = [MicroBatch(batches[number], 0, number, 0.0) for number in mine]
    found: dict[int, _Sums] = {}
    with _evaluating(model), torch.set_grad_enabled(gradients):
        loaded = iter(
            make_loader(data.dataset, micro_batches, rank.order.spec.mode.seed, data, device)
        )
        for number in mine:
            try:
                said = measure(model, to_device(next(loaded), device))
            except RuntimeError as error:
                if gradients or 'does not require grad' not in str(error):
                    raise
                raise BadInput(
                    'The function given to ctx.evaluate computes gradients, such as forces: give '
                    'gradients=True.'
                ) from error
            found[number] = _sums(said, len(batches[number]))
            after_batch()
    for others in gather(rank.peers, found, dict[int, _Sums]):
        found.update(others)
    return _means(list(found.values()))


def _sums(said: Mapping[str, Any], samples: int) -> _Sums:
    if not isinstance(said, Mapping):
        raise BadInput(
            f'The function given to ctx.evaluate returned a {type(said).__name__}; it must return '
            'a dict of metrics.'
        )
    sums: _Sums = {}
    for name, value in said.items():
        if isinstance(value, tuple) and len(value) == 2:
            sums[name] = float(value[0]), float(value[1])
        elif isinstance(value, torch.Tensor) and tuple(value.shape) == (samples,):
            sums[name] = float(value.detach().sum(dtype=torch.float64)), float(samples)
        else:
            shape = f' of shape {tuple(value.shape)}' if hasattr(value, 'shape') else ''
            raise BadInput(
                f'The function given to ctx.evaluate returned for {name!r} a '
                f'{type(value).__name__}{shape}; for a batch of {samples} samples it must be a '
                f"tensor of shape ({samples},), one value per sample (reduction='none'), or a pair "
                '(sum, number).'
            )
    return sums


def _means(found: list[_Sums]) -> dict[str, float]:
    means = {}
    for name in sorted({name for sums in found for name in sums}):
        pairs = [sums[name] for sums in found if name in sums]
        try:
            total = math.fsum(value for value, _ in pairs)
        except (OverflowError, ValueError):  # infinities of both signs
            total = math.nan
        number = math.fsum(count for _, count in pairs)
        means[name] = total / number if number else math.nan
    return means


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with as_before(own_generators):  # a rank's own batches have seeded them
            yield
    finally:
        for module, training in modes:
            module.training = training
