"""Compares what all ranks hold alike, of which a checkpoint has what rank 0 holds."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.devices import computes_as
from parsl_freetrain.training.comm.peers import gather, gather_bytes
from parsl_freetrain.training.loop.changes import has_own_state, is_metric, tensors_in
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.steps.buffers import is_plain
from parsl_freetrain.training.steps.group_settings import plain_values


class Replicas:
    """Compares what all ranks hold alike, where that is bit for bit: on devices of one kind."""

    def __init__(self, parts: RankParts, model: Model) -> None:
        self._peers, self._prepared, self._device = parts.peers, model.prepared, parts.device
        self._carried, self._said = model.carried, False
        self._possible = self._peers.world_size > 1 and model.division.alike
        self._of_one_kind: bool | None = None

    def check(self) -> None:
        """All ranks call this together. Raises BadInput on all of them if something differs."""
        if not self._possible:
            return
        if self._of_one_kind is None:
            kind = computes_as(self._device).encode()
            self._of_one_kind = len(set(gather_bytes(self._peers, kind))) == 1
        if not self._of_one_kind:
            return
        changed = self._carried.changed()
        objects = {  # of packages, or with a state
            k: v for k, v in changed.items() if k.startswith('package:') or has_own_state(v)
        }
        held = {**self._held(), **_norms(objects)}
        others = {} if self._said else _norms({k: changed[k] for k in changed.keys() - objects})
        digests = [*map(_digest, (held, others))]
        differ = self._peers.all_reduce_max([*digests, *(-one for one in digests)])()
        if differ[0] != -differ[2]:
            self._refuse(gather(self._peers, held))
        if differ[1] != -differ[3]:
            self._said = True
            first, *rest = gather(self._peers, others)
            names = [what for what in first if any(one.get(what) != first[what] for one in rest)]
            print(
                f'Note: on each rank another one is {", ".join(names[:6])}. Checkpoints hold '
                'what rank 0 has, with which all ranks go on after a cut.'
            )

    def _refuse(self, held: list[dict[str, Any]]) -> None:
        for what, value in held[0].items():
            for rank, theirs in enumerate(held):
                if repr(theirs.get(what)) != repr(value):
                    raise BadInput(
                        f'The ranks do not train the same model: {what} is {value!r} on rank 0 and '
                        f'{theirs.get(what)!r} on rank {rank}. Something in the function depends '
                        "on a rank's own samples or number: let it depend on ctx.samples, on "
                        'ctx.metrics and ctx.evaluate in ctx.each_epoch(fn), or on what '
                        'ctx.all_gather gives (rows of a memory); what initialises itself in its '
                        'first pass does so in ctx.warm_up(fn), before ctx.prepare.'
                    )
        raise BadInput(
            'The ranks do not train the same model: their schedulers or optimizers have different '
            'states. Make them in the same way on all ranks.'
        )

    def _held(self) -> dict[str, Any]:
        settings = [
            (f'in parameter group {j} of optimizer {i}', group)
            for i, optimizer in enumerate(self._prepared.optimizers, 1)
            for j, group in enumerate(optimizer.param_groups)
        ]
        for kind in ('scheduler', 'gradient scaler'):
            things = self._prepared.schedulers if kind == 'scheduler' else self._prepared.scalers
            settings += [(f'of {kind} {i}', one.state_dict()) for i, one in enumerate(things, 1)]
        held = {f'{key!r} {of}': v for of, its in settings for key, v in plain_values(its).items()}
        return {**held, **_norms_of({f'parameter {k}': one for k, one in self._prepared.called()})}


def _norms(named: Mapping[str, Any]) -> dict[str, float]:
    """Of tensors of several numbers there; metrics have sums of their rank."""
    own = {k: v for k, v in named.items() if not (isinstance(v, torch.nn.Module) or is_metric(v))}
    return _norms_of({k: t for k, t in tensors_in(own).items() if t.numel() > 1 and is_plain(t)})


@torch.no_grad()
def _norms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    norms = {
        f'the norm of {name}': torch.linalg.vector_norm(
            one, dtype=torch.promote_types(one.dtype, torch.float32)
        ).float()
        for name, one in tensors.items()
        if one.is_floating_point() or one.is_complex()
    }
    values = torch.stack(list(norms.values())).tolist() if norms else []
    return dict(zip(norms, values, strict=True))


def _digest(held: Mapping[str, Any]) -> int:
    packed = msgspec.msgpack.encode(held)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=7).digest(), 'big')
