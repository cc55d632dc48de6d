"""Dividing a model among ranks by torch's ``parallelize_module`` and ``fully_shard``."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import Box, box_of, local
from parsl_freetrain.training.data.own_generators import seed_of


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


def on_meta(model: nn.Module) -> bool:
    """Whether a model is on the meta device. Raises BadInput if only a part of it is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if meta and len(meta) < len(tensors):
        there = next(name for name, tensor in tensors.items() if not tensor.is_meta)
        raise BadInput(
            f'ctx.shard was given a model of which {meta[0]!r} is on the meta device and {there!r} '
            'is not: make all of it there, or none.'
        )
    return bool(meta)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that have another name too, with the first one."""
    first: dict[int, str] = {}
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name: by for name, one in named if (by := first.setdefault(id(one), name)) != name}


def make_empty(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device memory, and keep tied what is one tensor."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tied = {name: first for name, first in tied_names(model).items() if name in buffers}
    model.to_empty(device=device)  # torch keeps parameters tied
    for name, first in tied.items():
        owner, _, own = name.rpartition('.')
        model.get_submodule(owner)._buffers[own] = model.get_buffer(first)


def fill(
    model: nn.Module,
    device: torch.device,
    seed: int,
    initialise: Callable[[nn.Module], None] | None,
    *,
    saved: bool,
) -> None:
    """Give parameters and buffers first values, tied ones by their first module; if ``saved``, only
    what that lacks. BadInput without ``reset_parameters()``, or if that leaves a value unset.
    """
    filled = set[int]()
    with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
        for name, module in model.named_modules():
            if saved and not module._non_persistent_buffers_set:
                continue
            own = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
            if not filled.issuperset(map(id, own)):
                torch.manual_seed(seed_of(f'{seed}:{name}:initial'))
                _fill_one(name, module, device, initialise, filled)


@torch.no_grad()
def _fill_one(
    name: str,
    module: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
    filled: set[int],
) -> None:
    reset = getattr(module, 'reset_parameters', None)
    what = f'{type(module).__name__} {name!r}'
    if initialise is None and reset is None:
        raise BadInput(
            f'ctx.shard cannot give {what} its first values: it has no reset_parameters(); add '
            'one, pass initialise=, or make the model on the CPU.'
        )
    with _whole(module, device) as made:
        if initialise is not None:
            initialise(module)
        elif reset is not None:
            reset()
        made.update({**module._parameters, **module._buffers})
    for own, part in {**module._parameters, **module._buffers}.items():
        if part is None or id(part) in filled:
            continue
        filled.add(id(part))
        whole = made[own]
        if whole is None or part.shape != whole.shape or _is_unset(whole):
            by = 'reset_parameters()' if initialise is None else 'initialise'
            raise BadInput(
                f'ctx.shard: {by} leaves {own!r} of {what} without a value of the shape '
                f'{tuple(part.shape)}: set it there too, or make the model on the CPU.'
            )
        box = box_of(part)
        local(part).copy_(Box.whole(box.shape).inside(whole, box))


@contextmanager
def _whole(
    module: nn.Module, device: torch.device
) -> Iterator[dict[str, torch.Tensor | nn.Parameter | None]]:
    """A module with whole tensors, without values, in place of its own parts."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for places in (module._parameters, module._buffers):
        for own, part in places.items():
            if part is not None:
                whole = torch.empty(part.shape, dtype=part.dtype, device=device)
                _unset(whole)
                if isinstance(part, nn.Parameter):
                    whole = nn.Parameter(whole, requires_grad=part.requires_grad)
                places[own] = whole  # type: ignore[assignment]
    try:
        yield {}
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _unset(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor).any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())
