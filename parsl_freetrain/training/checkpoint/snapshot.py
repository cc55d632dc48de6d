"""Copies of a state in memory, so that training can continue while a copy is written."""

from __future__ import annotations

import torch

from parsl_freetrain.training.checkpoint.state import State

_ALIGNMENT = 64


class Snapshots:
    """Copies states, one at a time, into the same memory. A copy is valid until the next one is
    taken.

    The memory is one piece of the state's size. It is page-locked if tensors are on an accelerator,
    so that they are copied asynchronously.
    """

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def take(self, state: State) -> State:
        """A copy of a state on the CPU, complete on return."""
        devices = {tensor.device for tensor in state.tensors.values()} - {torch.device('cpu')}
        size = sum(_room(tensor) for tensor in state.tensors.values())
        if self._arena.numel() < size or self._locked != bool(devices):
            self._replace_arena(size, locked=bool(devices))
        copies, at = {}, 0
        for name, tensor in state.tensors.items():
            copy = self._arena[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
            at += _room(tensor)
        for device in devices:
            torch.accelerator.synchronize(device)
        return State(copies, state.structure, state.boxes)

    def on_cpu(self, state: State) -> State:
        """The state itself if all of it is on the CPU, else a copy as by :meth:`take`."""
        if all(tensor.device.type == 'cpu' for tensor in state.tensors.values()):
            return state
        return self.take(state)

    def _replace_arena(self, size: int, *, locked: bool) -> None:
        if self._locked and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        self._arena = torch.empty(0)  # not both at a time
        self._arena = torch.empty(size, dtype=torch.uint8, device='cpu')
        if locked and torch.cuda.is_available():
            # torch's own allocator of page-locked memory rounds up to a power of two. If this is
            # refused, copies are slower.
            torch.cuda.cudart().cudaHostRegister(self._arena.data_ptr(), size, 0)
        self._locked = locked


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
