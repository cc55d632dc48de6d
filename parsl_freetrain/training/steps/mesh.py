"""Which ranks train the same samples, and which hold the same parameters or parts of them."""

import io
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import MESH, Shape
from parsl_freetrain.training.checkpoint.flatten import put_together, take_apart
from parsl_freetrain.training.checkpoint.local_shard import is_divided
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.source import divided
from parsl_freetrain.training.checkpoint.state import Saved, State, content_of, restore
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.comm.collectives import broadcast_into
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.process.linux import guard_connections
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.mode import Mode, Reproducible
from parsl_freetrain.training.spec.shapes import check_shape
from parsl_freetrain.training.spec.training import TrainingSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Division:
    """One rank's position in the shape of its fragment; this kind: every rank holds the whole
    model. ``shape``: in the order; without one (not ``stated``) every rank trains its own samples.
    ``parts``, ``data_rank``: of a global batch, from 0. ``pipelined``: some ranks hold parameters
    that others do not. Raises BadInput if the shape does not fit the number of ranks or the mode.
    """

    whole = True
    pipelined = False

    def __init__(self, order: FragmentOrder, place: RankPlace, device: torch.device) -> None:
        self.shape = order.shape or Shape(data=place.world_size)
        self.stated = order.shape is not None
        if self.shape.ranks != place.world_size:
            raise BadInput(
                f'{order}: the shape {self.shape} is for {self.shape.ranks} ranks, but there are '
                f'{place.world_size}.'
            )
        check_shape(self.shape, order.spec.mode, str(order))
        self._rank, self._device, self._hang_s = place.rank, device, order.hang_s
        self.parts = self.shape.batch_parts
        self.data_rank = place.rank * self.parts // self.shape.ranks

    @property
    def grouped(self) -> bool:
        return self.shape.ranks > self.parts

    @property
    def alike(self) -> bool:
        return self.whole and not self.grouped

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks as a mesh with the dimensions of MESH, made by all at the same point."""
        world.show()  # a mesh needs a process group
        mesh = init_device_mesh(self._device.type, self.shape.sizes, mesh_dim_names=MESH)
        guard_connections(self._hang_s)
        for name in MESH:
            world.check_ends(mesh.get_group(name))
        return mesh

    @property
    def data_group(self) -> ProcessGroup | None:
        """The ranks that hold the same parameters and train different samples; None: all ranks."""
        return self.mesh.get_group('data') if self.grouped else None

    def check(self, prepared: Prepared, mode: Mode, clip_grad_norm: float | None) -> None:
        """Refuse what cannot be trained by this kind; raises BadInput."""
        for number, model in enumerate(prepared.models, 1):
            for name, parameter in model.named_parameters():
                if is_divided(parameter):
                    raise BadInput(
                        f'Parameter {name!r} of model {number} of ctx.prepare is a DTensor, so the '
                        "model is divided among ranks already, and none of the trainer's shapes "
                        'says so: state them, such as sizes={1: Shape(), 2: Shape(shard=2)}, and '
                        'let ctx.shard(model) divide it.'
                    )

    def make_equal(self, tensors: Iterable[torch.Tensor], peers: Peers) -> None:
        """Overwrite tensors, unless divided or on meta, by the first holder's."""
        peers.broadcast(_plain(tensors))

    @property
    def copies(self) -> int:
        return self.shape.ranks

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many this rank holds of the state; a whole one is one of one."""
        return 0, 1

    @property
    def saves(self) -> bool:
        """Whether this rank takes part when a checkpoint is written."""
        return self._rank == 0

    def collect(self, prepared: Prepared) -> dict[str, Any] | None:
        """The state that this rank writes, or None. All in :attr:`saves` must call this."""
        return content_of(prepared, named=self.stated)

    def part_of(self, state: State) -> State:
        return state

    def held(self, state: State, *, knows_all: bool) -> State:
        return state

    def restore(self, prepared: Prepared, saved: Saved) -> None:
        """Set what was prepared, as :func:`~parsl_freetrain.training.checkpoint.state.restore`."""
        restore(prepared, saved)


class ShardedDivision(Division):
    """A shape of the trainer divides the parameters: each rank holds, writes and reads its part."""

    whole = False

    def check(self, prepared: Prepared, mode: Mode, clip_grad_norm: float | None) -> None:
        # Only here, as it imports FSDP2.
        from parsl_freetrain.training.steps.sharded import check_sharded

        check_sharded(prepared, self, mode)

    @property
    def copies(self) -> int:
        return self.shape.data

    @property
    def part(self) -> tuple[int, int]:
        parts = self.shape.ranks // self.shape.data
        return self._rank % parts, parts

    @property
    def saves(self) -> bool:
        return True

    def part_of(self, state: State) -> State:
        return divided(state, self.mesh, self._rank)

    def held(self, state: State, *, knows_all: bool) -> State:
        return divided(state if knows_all else replace(state, structure=None))


class StagedDivision(Division):
    """A pipeline: each rank holds some stages of the model."""

    whole = False
    pipelined = True

    def check(self, prepared: Prepared, mode: Mode, clip_grad_norm: float | None) -> None:
        super().check(prepared, mode, clip_grad_norm)
        if clip_grad_norm is not None:
            raise BadInput(
                'ctx.prepare was given clip_grad_norm, but each rank of a pipeline holds the '
                'gradients of its own stages only, and the norm is over all of them: leave it '
                'out and clip in the model.'
            )

    def make_equal(self, tensors: Iterable[torch.Tensor], peers: Peers) -> None:
        sizes = dict(zip(MESH, self.shape.sizes, strict=True))
        groups = [self.mesh.get_group(k) for k, n in sizes.items() if n > 1 and k != 'pipeline']
        for tensor in _plain(tensors):
            for group in groups:
                broadcast_into(tensor, group=group, group_src=0)

    @property
    def copies(self) -> int:
        return 1  # not counted: no rank has the state of all stages

    @property
    def saves(self) -> bool:
        """The first data and spatial part of each stage."""
        return self._rank < self.shape.pipeline

    def collect(self, prepared: Prepared) -> dict[str, Any] | None:
        """The state of all stages on the first stage's rank; the other ranks send theirs."""
        content = content_of(prepared, named=self.stated)
        group = self.mesh.get_group('pipeline')
        if dist.get_rank(group):
            _send(content, group)
            return None
        for stage in range(1, self.shape.pipeline):
            content = _united(content, _receive(stage, group))
        return content

    def restore(self, prepared: Prepared, saved: Saved) -> None:
        restore(prepared, saved, parts=True)


@dataclass(frozen=True)
class Stepped:
    """What the optimizers of one rank step; ``in_hook``: a function given to the context runs."""

    order: FragmentOrder
    prepared: Prepared
    peers: Peers
    division: Division
    clip_grad_norm: float | None
    find_unused_parameters: bool
    device: torch.device
    in_hook: Callable[[], bool]


def division_of(order: FragmentOrder, place: RankPlace, device: torch.device) -> Division:
    """The division of an order's shape; raises BadInput as :class:`Division`."""
    if order.spec.sharded:
        return ShardedDivision(order, place, device)
    kind = StagedDivision if order.shape is not None and order.shape.pipeline > 1 else Division
    return kind(order, place, device)


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if not (is_divided(t) or t.is_meta) and t.layout is torch.strided]


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
    """Merge two nested states; where both have a value, the first one's counts."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {**first, **{key: _united(first.get(key, one), one) for key, one in second.items()}}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [_united(*both) for both in zip(first, second, strict=True)]
    return first


def fsdp_modules(models: Iterable[torch.nn.Module]) -> 'list[FSDPModule]':
    # Its import takes long. Where it has not been imported there is none.
    fsdp = sys.modules.get('torch.distributed.fsdp')
    if fsdp is None:
        return []
    return [m for model in models for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


def put_parts_back(models: Iterable[torch.nn.Module]) -> None:
    """Have modules hold their parts again, after a pass that failed with whole parameters."""
    for module in fsdp_modules(models):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.to_sharded()


def all_gather(
    tensor: torch.Tensor, spec: TrainingSpec, division: Division, steps: Any, peers: Peers
) -> torch.Tensor:
    if isinstance(spec.mode, Reproducible):
        if spec.shards == 1:
            return tensor
        raise BadInput(
            f'ctx.all_gather was called in reproducible mode with {spec.shards} virtual shards, '
            'which are trained one after the other, each with its own samples only: use '
            'mode=Throughput(), or Reproducible(shards=1) on one rank.'
        )
    weight = getattr(steps, 'whole_weight', None)
    if weight is None or division.shape.data != peers.world_size:
        raise BadInput(
            'ctx.all_gather needs ranks that hold whole models, and one pass for each global '
            'batch: leave out micro_batch and shapes.'
        )
    if peers.world_size == 1:
        return tensor
    rows = len(tensor) if weight else 0
    sizes = [int(one) for one in gather_bytes(peers, str(rows).encode(), 12)]
    # Every rank computes the same loss, and DDP takes the mean of what they weigh by their samples.
    factor = 1 / (weight * peers.world_size) if weight else 0.0
    gather: Any = _AllGather.apply
    found: torch.Tensor = gather(tensor, sizes, peers.rank, division.data_group, factor)
    return found


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sizes: list[int], rank: int, group: Any, factor: float
    ) -> torch.Tensor:
        ctx.of = sizes, rank, group, factor, tensor.shape
        own = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        own[: sizes[rank]] = tensor[: sizes[rank]]
        every = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(every, own, group=group)
        return torch.cat([one[:size] for one, size in zip(every, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes, rank, group, factor, shape = ctx.of
        total = grads[0].contiguous()
        dist.all_reduce(total, group=group)
        first, own = sum(sizes[:rank]), total.new_zeros(shape)
        own[: sizes[rank]] = total[first : first + sizes[rank]] * factor
        return own, None, None, None, None
