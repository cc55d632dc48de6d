"""Dividing a model among ranks by torch's ``parallelize_module`` and ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.sharded.initial import fill, make_empty, on_meta, tied_names


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    seed: int,
    *,
    blocks: Sequence[type[nn.Module]] = (),
    plan: Mapping[str, Any] | None = None,
    precision: MixedPrecisionPolicy | None = None,
    initialise: Callable[[nn.Module], None] | None = None,
    saved: bool = False,
    tensors: Iterable[int] = (),
) -> nn.Module:
    """Divide a model's parameters along the dimensions 'shard' and 'tensor' of a mesh. Raises
    BadInput if the model is sharded already, ``blocks`` are no classes, ``blocks`` or ``plan`` name
    nothing in it, a dimension cannot be divided, or a module cannot be initialised.

    Parameters
    ----------
    model
        The model, before its optimizer is made. On the meta device it takes no memory; it is then
        made on ``device`` and initialised module by module, so that no rank ever holds it whole.
    blocks
        Classes of the modules whose parameters are gathered together, usually the layer that the
        model repeats.
    plan
        As in ``parallelize_module``: by name of a module, how its work is divided along 'tensor'.
    precision
        As ``mp_policy`` of ``fully_shard``.
    initialise
        For a model on the meta device: sets a module's own parameters and buffers. Default: the
        module's ``reset_parameters()``.
    saved
        Whether a checkpoint will set everything that is in the model's state, so that only modules
        that keep something else need to be initialised.
    """
    if any(isinstance(tensor, DTensor) for tensor in model.parameters()):
        raise BadInput('ctx.shard was given a model that is sharded already: give it a plain one.')
    if not isinstance(blocks, Sequence) or not all(isinstance(block, type) for block in blocks):
        raise BadInput(
            f'ctx.shard was given blocks={blocks!r}; give classes of modules, as blocks=(Block,).'
        )
    found = [module for module in model.modules() if isinstance(module, tuple(blocks))]
    names = {type(module) for module in found}
    for block in blocks:
        if not any(issubclass(name, block) for name in names):
            raise BadInput(
                f'ctx.shard was given blocks={block.__name__}, and the model has no module of this '
                f'class; it has {_named(model)}.'
            )
    was_meta, tied = on_meta(model), tied_names(model)
    whole = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    tensors = set(tensors)
    if not plan and max(tensors, default=1) > 1:
        raise BadInput(
            f'ctx.shard was given no plan, and the trainer has shapes with tensor={max(tensors)}, '
            'whose ranks would all train the same: give a plan for parallelize_module, or shapes '
            'without tensor.'
        )
    for key, style in (plan or {}).items():
        planned = list(_named_by(key, model))
        owners = {module for module, _ in planned} if max(tensors, default=1) > 1 else set[str]()
        _refuse_apart({n: f for n, f in tied.items() if owners & {_owner(n), _owner(f)}})
        for parts in tensors:
            _check_style(style, planned, parts)
    if plan and mesh['tensor'].size() > 1:
        parallelize_module(model, mesh['tensor'], dict(plan))
        _check_divided(model, whole, mesh['tensor'].size())
    options: dict[str, Any] = {'mesh': mesh['shard']}
    if precision is not None:
        options['mp_policy'] = precision
    for module in reversed(found):  # from the inside out
        if not isinstance(module, FSDPModule):
            fully_shard(module, **options)
    if not isinstance(model, FSDPModule):
        fully_shard(model, **options)
    if was_meta:
        make_empty(model, device)
        fill(model, device, seed, initialise, saved=saved)
    still = tied_names(model)
    _refuse_apart({name: first for name, first in tied.items() if name not in still})
    return model


def _owner(name: str) -> str:
    return name.rpartition('.')[0]


def _refuse_apart(tied: Mapping[str, str]) -> None:
    for name, first in tied.items():
        raise BadInput(
            f'ctx.shard was given a model in which {first!r} and {name!r} are one tensor, and '
            'blocks or plan would make it two: leave out the modules that have it.'
        )


def _named_by(key: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a key of a plan names, as ``parallelize_module`` finds them."""
    modules, parts = dict(model.named_modules()), key.split('.')
    alike = [name.split('.') for name in modules if name.count('.') + 1 == len(parts)]
    found = ['.'.join(name) for name in alike if all(map(fnmatchcase, name, parts))]
    if not found:
        names = [name for name in modules if name]
        raise BadInput(
            f'ctx.shard was given a plan for {key!r}, and no module of the model has that name; '
            f'there are {", ".join(map(repr, names[:8]))}{" and others" if len(names) > 8 else ""}.'
        )
    yield from ((name, modules[name]) for name in found)


def _check_style(style: Any, planned: Iterable[tuple[str, nn.Module]], parts: int) -> None:
    for name, module in planned:
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        by_rows = isinstance(style, ColwiseParallel) == isinstance(module, nn.Linear)
        for of, parameter in module.named_parameters(recurse=False):
            dim = 0 if by_rows else 1
            if dim < parameter.dim():
                _check_even(f'{name}.{of}', dim, parameter.shape[dim], parts)


def _check_even(name: str, dim: int, size: int, parts: int) -> None:
    if size % parts:
        raise BadInput(
            f'ctx.shard: dimension {dim} of {name!r} has {size} elements, which {parts} tensor '
            'parallel ranks cannot share evenly; choose a multiple.'
        )


def _check_divided(model: nn.Module, whole: Mapping[str, tuple[int, ...]], parts: int) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for placement in parameter.placements:
            dim = getattr(placement, 'dim', None)
            if dim is not None:
                _check_even(name, dim, whole[name][dim], parts)


def _named(model: nn.Module) -> str:
    names = sorted({type(module).__name__ for module in model.modules()})
    return ', '.join(names[:8]) + (' and others' if len(names) > 8 else '')
