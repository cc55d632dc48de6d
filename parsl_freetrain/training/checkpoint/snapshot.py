"""Copies of a state in memory, so that training can continue while a copy is written."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from parsl_freetrain.training.checkpoint.block_digests import FileImage
from parsl_freetrain.training.checkpoint.parts import placed
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.transport_memory import memory_file

log = logging.getLogger(__name__)


class Snapshots:
    """Copies states, one at a time, into one piece of memory (page-locked, or a file in memory for
    other processes), enqueued before what comes next on the same stream.
    """

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._fd: int | None = None
        self._close: Callable[[], object] | None = None
        self._locked = False

    def reserve(self, state: State) -> None:
        """Make the memory for copies of a state, which takes long if it is page-locked."""
        size = placed(state.tensors, state.boxes)[0].nbytes
        locked = bool(_devices(state))
        if self._arena.numel() < size or self._locked != locked:
            self._replace_arena(size, locked=locked)

    def take(self, state: State) -> State:
        """A copy of a state on the CPU; complete once its image's content has been asked for."""
        self.reserve(state)
        layout, places = placed(state.tensors, state.boxes)
        size = layout.nbytes
        header = bytearray(layout.header)
        self._arena[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        copies = {}
        for name, tensor in state.tensors.items():
            start, length = places[name]
            copy = self._arena[start : start + length].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        copied = [torch.accelerator.current_stream(d).record_event() for d in _devices(state)]

        def complete() -> None:
            for event in copied:
                event.synchronize()

        image = FileImage(bytes_of(self._arena[:size]), self._fd, complete)
        return replace(state, tensors=copies, image=image)

    def _replace_arena(self, size: int, *, locked: bool) -> None:
        if self._locked and torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        self._arena = torch.empty(0)  # not both at a time
        if self._close is not None:
            self._close()
        self._fd = self._close = None
        self._arena = self._memory(size)
        if locked and torch.cuda.is_available():
            # torch's allocator of it rounds up to a power of two. If refused, copies are slower.
            torch.cuda.cudart().cudaHostRegister(self._arena.data_ptr(), size, 0)
        self._locked = locked

    def _memory(self, size: int) -> torch.Tensor:
        try:
            fd, content = memory_file(size)
        except OSError:
            log.warning('The state cannot be left in memory', exc_info=True)
            return torch.empty(size, dtype=torch.uint8, device='cpu')
        self._fd, self._close = fd, weakref.finalize(self, os.close, fd)
        return torch.frombuffer(content, dtype=torch.uint8)


def _devices(state: State) -> set[torch.device]:
    return {tensor.device for tensor in state.tensors.values()} - {torch.device('cpu')}
