"""A state as it is now, in memory of its own, so that training can go on while it is written."""

from __future__ import annotations

import torch

from parsl_freetrain.training.state import State


class Snapshots:
    """Copies states into the same memory again and again: one at a time, the one before must not be needed any more.

    What comes from a GPU is copied to page-locked memory, all of it at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: State) -> State:
        """A copy of a state on the CPU; complete on return."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in state.tensors.items()}
        for name, tensor in state.tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in state.tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return State(dict(buffers), state.structure)

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype and known.is_pinned() == tensor.is_cuda:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
