"""Loading the states of optimizers, and moving them to their parameters' device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parsl_freetrain.training.checkpoint.local_shard import divided_like, local


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, keep_types: bool) -> None:
    """Set an optimizer to a state that its ``state_dict()`` returned.

    Every tensor of a parameter's shape gets the parameter's memory layout. Checkpoints hold
    contiguous tensors, but fused kernels read all tensors in the order of memory, so with another
    layout of the parameter (channels_last) they would combine elements that do not belong together.
    ``keep_types``: keep the saved types. torch casts every tensor to its parameter's type, which
    rounds what an optimizer keeps in float32 for a bfloat16 parameter.
    """
    optimizer.load_state_dict(state)
    numbers = [number for group in state['param_groups'] for number in group['params']]
    for number, parameter in zip(numbers, _parameters(optimizer), strict=True):
        loaded, saved = optimizer.state.get(parameter), state['state'].get(number)
        if isinstance(loaded, dict) and isinstance(saved, dict):
            optimizer.state[parameter] = {
                key: value
                # torch does not cast the step, and decides on its device.
                if key == 'step'
                else _placed(value, saved.get(key), parameter, keep_types)
                for key, value in loaded.items()
            }


def move_to_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the state to the parameters' devices. Adagrad makes its state when it is created, on the
    device where the parameters are then.
    """
    for group in optimizer.param_groups:
        steps_too = group.get('fused') or group.get('capturable')
        for parameter in group['params']:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != 'step' or steps_too):
                    state[key] = value.to(parameter.device)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group['params'])


def _placed(loaded: Any, saved: Any, parameter: torch.Tensor, keep_types: bool) -> Any:
    if isinstance(loaded, Mapping) and isinstance(saved, Mapping):
        return {
            key: _placed(value, saved.get(key), parameter, keep_types)
            for key, value in loaded.items()
        }
    if isinstance(loaded, list) and isinstance(saved, list) and len(loaded) == len(saved):
        return [_placed(*both, parameter, keep_types) for both in zip(loaded, saved, strict=True)]
    if not isinstance(loaded, torch.Tensor):
        return loaded
    if keep_types and isinstance(saved, torch.Tensor) and saved.shape == loaded.shape:
        loaded = saved.to(loaded.device)
    own, kept = local(parameter), local(loaded)
    if kept.shape == own.shape and kept.stride() != own.stride():
        laid = torch.empty_like(own, dtype=kept.dtype, device=kept.device).copy_(kept)
        return divided_like(laid, loaded)
    return loaded
