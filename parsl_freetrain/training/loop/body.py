"""Looks at the first iterations of the user's loop for what would be lost or trained wrongly."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import CodeType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.data.own_generators import own_generators
from parsl_freetrain.training.loop.loss import refuse_sum
from parsl_freetrain.training.loop.rank_parts import LoopHooks
from parsl_freetrain.training.loop.unknown_state import frame_around, variables
from parsl_freetrain.training.spec.mode import ADASUM, Reproducible
from parsl_freetrain.training.spec.on_nan import ROLLBACK
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps.mesh import Division

_OURS = 'parsl_freetrain'
_passes = 0  # calls of backward() in this process
_looking: Callable[[Any], None] | None = None


def count_backward() -> None:
    plain = torch.autograd.backward
    if hasattr(plain, '__wrapped__'):
        return

    @wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        global _passes
        _passes += 1
        if _looking is not None:
            _looking(tensors)
        plain(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def has_whole_models(spec: TrainingSpec, division: Division, peers: Peers) -> bool:
    """Whether each rank trains whole models with its own samples, whose mean is taken."""
    adasum = getattr(spec.mode, 'combine', None) == ADASUM
    return not (spec.sharded or adasum) and division.shape.data == peers.world_size


def asks_for_means(hooks: LoopHooks, spec: TrainingSpec) -> bool:
    """Whether the function around us, or one in its variables or hooks, has ctx.epoch_means."""
    frame = frame_around()
    functions = [*hooks.before_step, *hooks.after_step, *hooks.each_epoch, *variables().values()]
    codes: list[Any] = [getattr(one, '__code__', None) for one in functions]
    codes.append(frame.f_code if frame is not None else None)
    for code in codes:
        if isinstance(code, CodeType):
            codes += code.co_consts
            if 'epoch_means' in code.co_names:
                if spec.mode.on_nan == ROLLBACK:
                    raise BadInput("ctx.epoch_means cannot go back, as on_nan='rollback' may.")
                return True
    return False


def find_generators(hooks: LoopHooks, data: LoaderData) -> None:
    """Know the generators in the data, in functions for the step and around the loop."""
    functions = [*hooks.before_step, *hooks.after_step, *hooks.each_epoch]
    own_generators.find({'the functions': functions, **variables()})
    own_generators.find({'the data': data.dataset, 'sampler': data.sampler})


class Body:
    """What is seen of the body of one loop, made in the call of ``ctx.loop``. ``anew``: whether the
    loop begins here; ``mean``: whether its loss must be a mean if it has several parts.
    """

    def __init__(
        self, spec: TrainingSpec, division: Division, peers: Peers, anew: bool, mean: bool
    ) -> None:
        reproducible = isinstance(spec.mode, Reproducible)
        # DDP waits in each backward pass.
        self._together = not reproducible and division.shape.data > 1
        parts = spec.shards if reproducible else spec.max_nodes * (spec.ranks.per_node or 1)
        self._mean = mean and parts > 1 and has_whole_models(spec, division, peers)
        self._anew, self._around = anew, frame_around()
        self._iterations = self._before = 0
        variables = self._around.f_locals if self._around is not None else {}
        _refuse_loaders(variables)
        self._sizes = {name: len(one) for name, one in _containers(variables)}
        count_backward()

    def begin(self) -> None:
        global _looking
        self._before, self._iterations = _passes, self._iterations + 1
        _looking = refuse_sum if self._mean and self._iterations == 1 else None

    def end(self, data: Any, stepped: bool) -> None:
        """Raises BadInput if the batch was not used, or a variable would be lost."""
        global _looking
        _looking = None
        trained = _passes > self._before
        if self._together and not trained:
            raise BadInput(
                'An iteration of ctx.loop ended without backward() on this rank, for which the '
                'other ranks wait: train every batch, with a loss times 0 where it is to be '
                'skipped, and leave samples out by a sampler or in the dataset.'
            )
        if self._anew and self._iterations == 1 and not (trained or stepped) and _holds(data):
            raise BadInput(
                'ctx.loop was asked for the next batch before the first one was trained, by '
                'backward() and optimizer.step(). If something looks ahead in it, leave that out, '
                'as a batch would be lost at each stop (DataLoader workers load ahead: num_workers)'
                '; leave samples out by a sampler or in the dataset.'
            )
        if self._around is not None and self._iterations == 2:
            variables, self._around = self._around.f_locals, None
            _refuse_loaders(variables)
            self._refuse_memories(variables)

    def _refuse_memories(self, variables: Mapping[str, Any]) -> None:
        for name, one in _containers(variables):
            last = next(reversed(one.values() if isinstance(one, dict) else one), None)
            if len(one) > self._sizes.get(name, len(one)) and _is_data(last):
                raise BadInput(
                    f'{name} is filled with tensors in the body of ctx.loop, which are of this '
                    "rank's samples only and would be lost at the end of a fragment: keep them in "
                    'a buffer of a module that is given to ctx.prepare, numbers in ctx.state, and '
                    'means by ctx.report.'
                )


def _refuse_loaders(variables: Mapping[str, Any]) -> None:
    for name, value in _variables(variables):
        if isinstance(value, Iterator) and _reads_loader(value):
            raise BadInput(
                f'{name} reads a DataLoader beside ctx.loop: its position would be lost at the end '
                'of each fragment, and its order would depend on the nodes. Give ctx.loop all '
                'DataLoaders: "for (x, y), (u,) in ctx.loop((labelled, unlabelled)):".'
            )


def _reads_loader(value: Any, depth: int = 4) -> bool:
    if isinstance(value, GeneratorType) and f'/{_OURS}/' in value.gi_code.co_filename:
        return False
    if isinstance(value, (_BaseDataLoaderIter, DataLoader)):
        return True
    inner = isinstance(value, (Iterator, list, tuple)) and depth
    return bool(inner) and any(
        _reads_loader(one, depth - 1) for one in gc.get_referents(value)[:64]
    )


def _variables(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Variables, and attributes of plain objects among them, not of datasets: those are caches."""
    for name, value in variables.items():
        yield name, value
        own = getattr(type(value), '__module__', '').startswith((_OURS, 'torch'))
        own |= hasattr(type(value), 'state_dict')  # a model, an optimizer: it knows its state
        data = isinstance(value, Dataset) or hasattr(type(value), '__getitem__')
        data |= isinstance(value, (type, torch.optim.Optimizer))  # whose state is saved
        if not (own or data) and hasattr(value, '__dict__'):
            yield from ((f'{name}.{key}', one) for key, one in vars(value).items())


def _containers(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return (
        (name, one) for name, one in _variables(variables) if isinstance(one, (list, deque, dict))
    )


def _is_data(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return bool(np.prod(value.shape) > 1)
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(_is_data, value[:16]))


def _holds(batch: Any) -> bool:
    """Whether a batch has samples; a collate function may have left all out."""
    return batch is not None and not (hasattr(batch, '__len__') and len(batch) == 0)
