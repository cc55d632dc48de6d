"""Whether all ranks hold the same state, of which rank 0's is saved."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import gather_bytes
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.steps.group_settings import plain_values


class Replicas:
    """Compares parameters (by their norms), schedulers, gradient scalers and settings of optimizers
    of all ranks, if every rank holds all of them.

    Ranks that take the same steps have the same bits on processors and devices of one kind, and
    only there.
    """

    def __init__(self, parts: RankParts, model: Model) -> None:
        self._peers, self._prepared, self._device = parts.peers, model.prepared, parts.device
        self._possible = self._peers.world_size > 1 and model.division.alike
        self._of_one_kind: bool | None = None

    def check(self) -> None:
        """Compare them. All ranks call this together. Raises BadInput if something differs, on all
        ranks.
        """
        if not self._possible:
            return
        if self._of_one_kind is None:
            device = (
                ''
                if self._device.type == 'cpu'
                else torch.get_device_module(self._device).get_device_name(self._device)
            )
            kind = f'{torch.backends.cpu.get_cpu_capability()} {device}'
            self._of_one_kind = len(set(gather_bytes(self._peers, kind.encode()))) == 1
        if not self._of_one_kind:
            return
        packed = msgspec.msgpack.encode(self._held())
        digest = int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), 'big')
        largest, smallest = self._peers.all_reduce_max((digest, -digest))()
        if largest != -smallest:
            self._refuse([msgspec.msgpack.decode(one) for one in gather_bytes(self._peers, packed)])

    def _refuse(self, held: list[dict[str, Any]]) -> None:
        for what, value in held[0].items():
            for rank, theirs in enumerate(held):
                if repr(theirs.get(what)) != repr(value):
                    raise BadInput(
                        f'The ranks do not train the same model: {what} is {value!r} on rank 0 and '
                        f'{theirs.get(what)!r} on rank {rank}. Something in the function depends '
                        "on a rank's own samples or number: let it depend on ctx.samples, or on "
                        'ctx.metrics and ctx.evaluate in ctx.each_epoch(fn).'
                    )
        raise BadInput(
            'The ranks do not train the same model: their schedulers or optimizers have different '
            'states. Make them in the same way on all ranks.'
        )

    @torch.no_grad()
    def _held(self) -> dict[str, Any]:
        norms = {
            f'the norm of parameter {name!r} of model {i}': torch.linalg.vector_norm(
                parameter, dtype=torch.promote_types(parameter.dtype, torch.float32)
            ).float()
            for i, model in enumerate(self._prepared.models, 1)
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        values = torch.stack(list(norms.values())).tolist() if norms else []
        return {
            **{
                f'{key!r} in parameter group {j} of optimizer {i}': value
                for i, optimizer in enumerate(self._prepared.optimizers, 1)
                for j, group in enumerate(optimizer.param_groups)
                for key, value in plain_values(group).items()
            },
            **{
                f'{key!r} of {kind} {i}': value
                for kind, things in (
                    ('scheduler', self._prepared.schedulers),
                    ('gradient scaler', self._prepared.scalers),
                )
                for i, thing in enumerate(things, 1)
                for key, value in plain_values(thing.state_dict()).items()
            },
            **dict(zip(norms, values, strict=True)),
        }
