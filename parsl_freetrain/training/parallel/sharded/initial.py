"""The first values of a model made on the meta device, module by module, each from its own seed:
they depend neither on the ranks nor on the division, and a rank holds one whole module at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def refuse_ties(model: nn.Module) -> None:
    """Refuse tensors that several modules share, since making them would separate them."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise BadInput(
                f'ctx.shard was given a model on the meta device in which {first!r} and {name!r} '
                'are one parameter; they would be two afterwards: make this model on the CPU.'
            )


def fill(
    model: nn.Module,
    device: torch.device,
    seed: int,
    initialise: Callable[[nn.Module], None] | None,
    *,
    saved: bool,
) -> None:
    """Give every parameter and buffer its first value; if a state is ``saved``, only those of
    modules with buffers that it does not have. Raises BadInput if a module has no
    ``reset_parameters()``, or that leaves a value unset.
    """
    with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []):
        for name, module in model.named_modules():
            if saved and not module._non_persistent_buffers_set:
                continue
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                torch.manual_seed(_seed(seed, name))
                _fill_one(name, module, device, initialise)


@torch.no_grad()
def _fill_one(
    name: str,
    module: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
) -> None:
    reset = getattr(module, 'reset_parameters', None)
    what = f'{type(module).__name__} {name!r}'
    if initialise is None and reset is None:
        raise BadInput(
            f'ctx.shard cannot give {what} its first values: it has no reset_parameters(); add '
            'one, pass initialise=, or make the model on the CPU.'
        )
    with _whole(module, device) as tensors:
        for tensor in tensors.values():
            _unset(tensor)
        if initialise is not None:
            initialise(module)
        elif reset is not None:
            reset()
        left = [own for own, tensor in tensors.items() if _is_unset(tensor)]
    if left:
        by = 'reset_parameters()' if initialise is None else 'initialise'
        raise BadInput(
            f'ctx.shard: {by} leaves {", ".join(map(repr, left))} of {what} without a value: set '
            'it there too, or make the model on the CPU.'
        )


@contextmanager
def _whole(module: nn.Module, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """A module with whole tensors in place of its own parts, which get their values at the end."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    made: dict[str, torch.Tensor] = {}
    for own, parameter in parameters.items():
        if parameter is not None:
            made[own] = nn.Parameter(
                torch.empty(parameter.shape, dtype=parameter.dtype, device=device),
                requires_grad=parameter.requires_grad,
            )
            module._parameters[own] = made[own]  # type: ignore[assignment]
    made.update((own, buffer) for own, buffer in buffers.items() if buffer is not None)
    try:
        yield made
    finally:
        filled = {own: module._parameters[own] for own in parameters if own in made}
        module._parameters.update(parameters)
    for own, parameter in parameters.items():
        whole = filled.get(own)
        if parameter is not None and whole is not None:
            _take_own_part(parameter, whole)


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
