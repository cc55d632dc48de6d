"""Copies of a state in memory, so that training can continue while a copy is written."""

from __future__ import annotations

import torch

from parsl_freetrain.training.checkpoint.state import State


class Snapshots:
    """Copies states, one at a time, into the same memory. A copy is valid until the next one is
    taken.

    Tensors on a GPU are copied to page-locked memory, asynchronously.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, state: State) -> State:
        """A copy of a state on the CPU, complete on return."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in state.tensors.items()}
        for name, tensor in state.tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in state.tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._buffers = buffers
        return State(dict(buffers), state.structure, state.boxes)

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._buffers.get(name)
        if (
            known is not None
            and known.shape == tensor.shape
            and known.dtype == tensor.dtype
            and known.is_pinned() == tensor.is_cuda
        ):
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
