"""What ``ctx.prepare`` and ``ctx.shard`` do with models, optimizers and schedulers."""

import zlib
from typing import TYPE_CHECKING, Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import optimizer_state
from parsl_freetrain.training.checkpoint.module_state import ModuleState, Structure
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.checkpoint.trial import try_optimizers
from parsl_freetrain.training.comm.peers import gather
from parsl_freetrain.training.loop.carried import Carried
from parsl_freetrain.training.loop.rank_parts import Model, RankParts, Steps
from parsl_freetrain.training.spec.mode import ROLLBACK, Reproducible, Scaled
from parsl_freetrain.training.steps.buffers import make_plain
from parsl_freetrain.training.steps.ddp import ThroughputSteps
from parsl_freetrain.training.steps.deferred import scale_steps
from parsl_freetrain.training.steps.mesh import Division, Stepped
from parsl_freetrain.training.steps.nonfinite import Watch
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps

if TYPE_CHECKING:
    from parsl_freetrain.training.loop.fragment_run import FragmentRun


def prepare_model(
    things: tuple[Any, ...], run: 'FragmentRun', clip_grad_norm: float | None, find_unused: bool
) -> Model:
    """Models on the device in the checkpoint's state, and their steps; or BadInput."""
    parts, division, hooks = run.parts, run.division, run.hooks
    prepared, modules, variables = _restored(things, parts, division, clip_grad_norm)
    watch = Watch(prepared)
    if isinstance(mode := parts.order.spec.mode, Scaled):
        scale_steps(
            prepared.optimizers, lambda: mode.lr_factor(parts.place.world_size, run.state.samples)
        )
    how = clip_grad_norm, find_unused, parts.device, lambda: hooks.running
    steps = _make_steps(Stepped(parts.order, prepared, parts.peers, division, *how))
    goes_back = mode.on_nan == ROLLBACK
    carried = Carried(variables, parts.device, prepared, goes_back=goes_back)
    return Model(prepared, division, steps, watch, hooks, modules, Structure(prepared), carried)


def _make_steps(what: Stepped) -> Steps:
    if not isinstance(what.order.spec.mode, Reproducible):
        return ThroughputSteps(what)
    if not what.order.spec.sharded:
        return ReproducibleSteps(what)
    # Only here, as it imports FSDP2.
    from parsl_freetrain.training.steps.sharded import ShardedReproducibleSteps

    return ShardedReproducibleSteps(what)


def _restored(
    things: tuple[Any, ...], parts: RankParts, division: Division, clip_grad_norm: float | None
) -> tuple[Prepared, ModuleState, dict[str, Any]]:
    prepared = sort_out(things, named=division.stated)
    for model in (*prepared.models, *prepared.averages):
        make_plain(model)
        model.to(parts.device)
    for own in prepared.own:
        for tensor in own.tensors.values():
            tensor.data = tensor.data.to(parts.device)
    for optimizer in prepared.optimizers:
        optimizer_state.move_to_parameters(optimizer)
    division.check(prepared, parts.order.spec.mode, clip_grad_norm)
    saved = parts.saved.load(prepared) if parts.saved is not None else None
    modules = ModuleState(prepared.models, saved.modules if saved is not None else None)
    if saved is not None:
        division.restore(prepared, saved)
        modules.put_back()
    else:
        its, optimizers = optimizer_state.orders(prepared), prepared.optimizers
        if len(set(gather(parts.peers, zlib.crc32(repr(its).encode())))) > 1:  # those of sets
            for optimizer, order in zip(optimizers, gather(parts.peers, its)[0], strict=False):
                optimizer_state.put_in_order(optimizer, order, prepared)
        try_optimizers(prepared)
        division.make_equal((tensor.data for tensor in prepared.tensors()), parts.peers)
    return prepared, modules, saved.variables if saved is not None else {}


_SHARDS_SINCE = '2.10'  # with 2.9 the bits of sharded models depend on the number of ranks


def shard_model_of(
    parts: RankParts, division: Division, model: torch.nn.Module, **how: Any
) -> torch.nn.Module:
    spec = parts.order.spec
    if not spec.sharded:
        raise BadInput(
            f'Trainer {parts.order.trainer!r} calls ctx.shard, and none of its shapes divides the '
            'parameters: state them, such as sizes={1: Shape(), 2: Shape(shard=2)}.'
        )
    if torch.__version__ < _SHARDS_SINCE:
        raise BadInput(
            f'ctx.shard needs torch {_SHARDS_SINCE} or newer, and this is {torch.__version__}: the '
            'weights would depend on the number of ranks.'
        )
    if parts.saved is None:
        division.make_equal((t.data for t in model.state_dict().values()), parts.peers)
    # Only here, as it imports FSDP2.
    from parsl_freetrain.training.parallel.sharded import shard_model

    return shard_model(
        model,
        division.mesh,
        parts.device,
        spec.mode.seed,
        saved=parts.saved is not None,
        tensors={shape.tensor for shapes in spec.shapes.values() for shape in shapes},
        **how,
    )
