"""How the ranks of a fragment share the work: which ranks train the same samples, and which hold
the same parameters.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import MESH, Shape
from parsl_freetrain.training.checkpoint.flatten import put_together, take_apart
from parsl_freetrain.training.checkpoint.local_shard import is_divided
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.comm.collectives import broadcast_into
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.process import lazy_dynamo
from parsl_freetrain.training.process.liveness import guard_connections
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.shapes import check_shape


class Division:
    """One rank's position in the shape of its fragment.

    Attributes
    ----------
    shape
        The shape in the order; if there is none, every rank trains its own samples.
    stated
        Whether the order has a shape. The trainer may then continue in another one.
    sharded
        Whether a shape of the trainer divides the parameters.
    parts, data_rank
        Number of parts of a global batch, and the number of this rank's part, from 0.

    Raises
    ------
    BadInput
        If the shape does not fit the number of ranks, or the mode does not support it.
    """

    def __init__(self, order: FragmentOrder, place: RankPlace, device: torch.device) -> None:
        self.shape = order.shape or Shape(data=place.world_size)
        self.stated = order.shape is not None
        where = f'Trainer {order.trainer!r}, fragment {order.fragment}'
        if self.shape.ranks != place.world_size:
            raise BadInput(
                f'{where}: the shape {self.shape} is for {self.shape.ranks} ranks, but there are '
                f'{place.world_size}.'
            )
        check_shape(self.shape, order.spec.mode, where)
        self._rank, self._device, self._hang_s = place.rank, device, order.hang_s
        self.sharded = order.spec.sharded
        self.parts = self.shape.batch_parts
        self.data_rank = place.rank * self.parts // self.shape.ranks

    @property
    def pipelined(self) -> bool:
        """Whether some ranks hold parameters that others do not."""
        return self.shape.pipeline > 1

    @property
    def grouped(self) -> bool:
        """Whether several ranks train the same samples."""
        return self.shape.ranks > self.parts

    @property
    def saves(self) -> bool:
        """Whether this rank gives a part of a checkpoint: each rank of a sharded trainer, else the
        first data and spatial part of each stage.
        """
        return self.sharded or self._rank < self.shape.pipeline

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many this rank holds of the state; a whole one is one of one."""
        parts = self.shape.ranks // self.shape.data if self.sharded else 1
        return self._rank % parts, parts

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh with the dimensions :data:`~parsl_freetrain.core.model.types.MESH`.

        It is made when it is first asked for, which all ranks must do at the same point.
        """
        if not dist.is_initialized():  # one rank has no process group, but a mesh needs one
            os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
            with lazy_dynamo.hidden():
                dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(self._device.type, self.shape.sizes, mesh_dim_names=MESH)
        guard_connections(self._hang_s)
        return mesh

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that hold the same parameters and train different samples; None: all ranks."""
        return self.mesh.get_group('data') if self.grouped else None

    def make_equal(self, tensors: Iterable[torch.Tensor], peers: Peers) -> None:
        """Overwrite tensors with those of the first rank that holds the same ones. Tensors that are
        divided among ranks, or have no values yet, are left as they are.
        """
        tensors = [t for t in tensors if not (is_divided(t) or t.is_meta)]
        if not self.pipelined:
            peers.broadcast(tensors)
            return
        groups = [
            self.mesh.get_group(what)
            for what, size in zip(MESH, self.shape.sizes, strict=True)
            if size > 1 and what != 'pipeline'
        ]
        for tensor in tensors:
            for group in groups:
                broadcast_into(tensor, group=group, group_src=0)

    def join(self, content: dict[str, Any]) -> dict[str, Any]:
        """Collect the state of all stages on the first stage's rank. The other ranks send theirs,
        and get back their own.

        All ranks that give something (:attr:`saves`) must call this.
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
    packed = io.BytesIO()
    torch.save(take_apart(content, {}), packed)
    data = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
    for part in (torch.tensor([data.numel()], device='cpu'), data):
        dist.send(part, group=group, group_dst=0)


def _receive(stage: int, group: ProcessGroup) -> dict[str, Any]:
    size = torch.zeros(1, dtype=torch.int64, device='cpu')
    dist.recv(size, group=group, group_src=stage)
    data = torch.empty(int(size), dtype=torch.uint8, device='cpu')
    dist.recv(data, group=group, group_src=stage)
    packed = io.BytesIO(bytes_of(data))
    return put_together(*torch.load(packed, map_location='cpu', weights_only=True))


def _united(first: Any, second: Any) -> Any:
    """Merge two nested states. Where both have a value that is not a container, the first one's
    counts.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            **first,
            **{
                key: _united(first[key], value) if key in first else value
                for key, value in second.items()
            },
        }
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_united(*both) for both in zip(first, second, strict=True)]
    return first
