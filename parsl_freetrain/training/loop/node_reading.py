"""One reader of a checkpoint on each node: it sends what it reads to the node's other ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import torch

from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.comm.peers import Peers


def read_once(node: Peers, read: Callable[[], State]) -> State:
    """What ``read`` returns on the node's first rank. All ranks of ``node`` call this together.

    Tensors are sent one by one, so no rank needs memory for a second copy.
    """
    if node.world_size == 1:
        return read()
    state = read() if node.rank == 0 else None
    structure = io.BytesIO()
    described: list[tuple[str, str, list[int]]] = []
    if state is not None:
        torch.save(state.structure, structure)
        described = [
            (name, str(tensor.dtype).removeprefix('torch.'), list(tensor.shape))
            for name, tensor in state.tensors.items()
        ]
    described = json.loads(_bytes_of(node, json.dumps(described).encode()))
    content = _bytes_of(node, structure.getvalue())
    if state is None:
        state = State(
            {
                name: torch.empty(shape, dtype=getattr(torch, dtype), device='cpu')
                for name, dtype, shape in described
            },
            torch.load(io.BytesIO(content), map_location='cpu', weights_only=True),
        )
    node.broadcast(
        tensor.reshape(-1).view(torch.uint8) for tensor in state.tensors.values() if tensor.numel()
    )
    return state


def _bytes_of(node: Peers, content: bytes) -> bytes:
    """The bytes of the first rank."""
    size = torch.tensor([len(content)], dtype=torch.int64, device='cpu')
    node.broadcast([size])
    data = torch.empty(int(size), dtype=torch.uint8, device='cpu')
    if node.rank == 0:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    node.broadcast([data])
    return bytes(data.numpy())
