"""First values of a model on the meta device, by module and seed: alike for any division."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parsl_freetrain.core.model.errors import BadInput


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
                torch.manual_seed(_seed(seed, name))
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
    parts = {**module._parameters, **module._buffers}
    for own, part in parts.items():
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
        _take_own_part(part, whole)


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


def _take_own_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dimension, min(offset, whole.shape[dimension] - size), size)
    parameter.to_local().copy_(whole)


def _unset(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(torch.isnan(tensor).any())
    return tensor.dtype != torch.bool and bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f'{seed}:{name}:initial'.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
