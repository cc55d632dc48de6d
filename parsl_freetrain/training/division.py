"""How the ranks of a fragment share the work: which of them train the same samples, and which hold the same parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import MESH, Shape
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace, check_shape
from parsl_freetrain.training.liveness import guard_connections
from parsl_freetrain.training.packing import pack, unpack
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.state import State
from parsl_freetrain.training.structure import put_together, take_apart


class Division:
    """One rank's place in the shape of its fragment.

    Attributes
    ----------
    shape
        That of the order; where it states none, every rank trains samples of its own.
    stated
        Whether the order states one: the trainer may go on in another one.
    data_rank
        Which part of a global batch is this rank's, from 0.

    Raises
    ------
    BadInput
        If the shape is not one of so many ranks, or the mode is not for it.
    """

    def __init__(self, order: FragmentOrder, place: RankPlace, device: torch.device) -> None:
        self.shape = order.shape or Shape(data=place.world_size)
        self.stated = order.shape is not None
        where = f'Trainer {order.trainer!r}, fragment {order.fragment}'
        if self.shape.ranks != place.world_size:
            raise BadInput(f'{where}: the shape {self.shape} is one of {self.shape.ranks} ranks, and there are {place.world_size}.')
        check_shape(self.shape, order.mode, order.on_nan, where)
        self._rank, self._device, self._hang_s = place.rank, device, order.hang_s
        self.data_rank = place.rank * self.shape.data // self.shape.ranks

    @property
    def pipelined(self) -> bool:
        """Whether ranks hold parameters that others don't."""
        return self.shape.pipeline > 1

    @property
    def grouped(self) -> bool:
        """Whether several ranks train the same samples."""
        return self.shape.ranks > self.shape.data

    @property
    def saves(self) -> bool:
        """Whether a part of a checkpoint is this rank's to give: the first data and spatial part of each stage."""
        return self._rank < self.shape.pipeline

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks, with the dimensions :data:`~parsl_freetrain.core.words.MESH`; all ranks must ask for it at the same point."""
        if not dist.is_initialized():  # one rank needs no process group, but a mesh does
            os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
            dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(self._device.type, self.shape.sizes, mesh_dim_names=MESH)
        guard_connections(self._hang_s)
        return mesh

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that hold the same and train other samples; None: all."""
        return self.mesh.get_group('data') if self.grouped else None

    def make_equal(self, tensors: Iterable[torch.Tensor], peers: Peers) -> None:
        """Overwrite tensors by those of the first rank that holds the same ones."""
        if not self.pipelined:
            peers.broadcast(tensors)
            return
        groups = [self.mesh.get_group(what) for what, size in zip(MESH[:-1], self.shape.sizes, strict=False) if size > 1]
        for tensor in tensors:
            for group in groups:
                dist.broadcast(tensor, group=group, group_src=0)

    def join(self, content: dict[str, Any]) -> dict[str, Any]:
        """What all stages have together, at the rank that is the first; the others hand theirs over and get it back.

        To be called by those that have something to give (:attr:`saves`), all of them.
        """
        if not self.pipelined:
            return content
        group = self.mesh.get_group('pipeline')
        if dist.get_rank(group):
            _send(content, group)
            return content
        for stage in range(1, self.shape.pipeline):
            content = _united(content, _receive(stage, group))
        return content


def _send(content: dict[str, Any], group: ProcessGroup) -> None:
    fd, data = pack(State(*take_apart(content, {})))
    os.close(fd)
    for part in (torch.tensor([data.numel()], device='cpu'), data):
        dist.send(part, group=group, group_dst=0)


def _receive(stage: int, group: ProcessGroup) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.int64, device='cpu')
    dist.recv(size, group=group, group_src=stage)
    data = torch.empty(int(size), dtype=torch.uint8, device='cpu')
    dist.recv(data, group=group, group_src=stage)
    state = unpack(data)
    return put_together(state.tensors, state.structure)


def _united(first: Any, second: Any) -> Any:
    """Two nested states as one; where both have something that is no container, that of the first."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {**first, **{key: _united(first[key], value) if key in first else value for key, value in second.items()}}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_united(*both) for both in zip(first, second, strict=True)]
    return first
