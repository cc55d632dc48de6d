"""The norm of a gradient whose parts are on several ranks, with the same bits however many: squares
are added up within each row along a fixed tree, then the rows' sums at fixed places of one vector.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import box_of, divided_along, is_divided, local

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip(parameters: Sequence[torch.Tensor], mesh: DeviceMesh, largest: float) -> None:
    """Scale the gradients so that their norm is at most ``largest``. All ranks call this."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        factor = largest / (norm(gradients, mesh) + _EPSILON)
        for gradient in gradients:
            part = local(gradient)
            part.mul_(torch.clamp(factor, max=1.0).to(part.dtype))


def norm(gradients: Sequence[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """The 2-norm of all gradients together, in double precision."""
    parts = mesh['tensor'].size()
    lengths = [(gradient.shape[0] if gradient.dim() else 1) * parts for gradient in gradients]
    sums = torch.zeros(sum(lengths), dtype=torch.float64, device=local(gradients[0]).device)
    at = 0
    for gradient, length in zip(gradients, lengths, strict=True):
        _enter(gradient, sums[at : at + length].view(parts, -1), mesh)
        at += length
    for name in ('shard', 'tensor'):
        if mesh[name].size() > 1:
            # Each place is set on one rank and zero on the others, so this adds without rounding.
            dist.all_reduce(sums, group=mesh.get_group(name))
    return _total(sums).sqrt()


def _enter(gradient: torch.Tensor, place: torch.Tensor, mesh: DeviceMesh) -> None:
    """Enter the sums of this rank's rows into ``place``: (tensor parallel parts, rows)."""
    divided, own, box = divided_along(gradient), local(gradient), box_of(gradient)
    number = mesh['tensor'].get_local_rank()
    if is_divided(gradient):
        names = gradient.device_mesh.mesh_dim_names or ()
        dims = dict(zip(names, (getattr(p, 'dim', 0) for p in gradient.placements), strict=True))
        if dims.get('shard', 0):
            raise BadInput(
                'clip_grad_norm needs parameters that fully_shard divides along dimension 0, so '
                'that rows stay whole: leave out shard_placement_fn.'
            )
    if ('tensor' not in divided and number) or (
        'shard' not in divided and mesh['shard'].get_local_rank()
    ):
        return  # another rank enters the same
    if not own.numel():
        return
    rows = own.reshape(own.shape[0] if own.dim() else 1, -1).to(
        torch.promote_types(own.dtype, torch.float32)
    )
    first = box.offsets[0] if box.offsets else 0
    # Rows that lie whole on one rank have their place in the first part.
    whole = box.sizes[1:] == box.shape[1:]
    place[0 if whole else number, first : first + len(rows)] = _total(rows * rows).double()


def _total(rows: torch.Tensor) -> torch.Tensor:
    """Sums along the last dimension by elementwise additions only: first half plus second half."""
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = torch.cat([rows[..., :half] + rows[..., half : 2 * half], rows[..., 2 * half :]], -1)
    return rows[..., 0]
