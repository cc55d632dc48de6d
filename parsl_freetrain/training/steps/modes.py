"""The modes of training: how passes of the user's loop make up a step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader import MicroBatch
from parsl_freetrain.training.data.sample_order import GlobalBatch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.mode import ADASUM, STOP, NonFinitePolicy, Reproducible, Scaled
from parsl_freetrain.training.steps.ddp import ThroughputSteps
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps


class Steps(Protocol):
    """One mode. ``delay``: maximum number of batches from a wish to the decision. ``kept_back``:
    the last step was skipped because of its gradient. ``before_step``: functions to call when the
    gradient is known. ``stepped``: an optimizer has been stepped. ``changed``: the last batch has
    begun to change what checkpoints hold, apart from buffers.
    """

    @property
    def delay(self) -> int: ...
    @property
    def optimizers(self) -> tuple[Any, ...]: ...
    @property
    def schedulers(self) -> tuple[Any, ...]: ...
    @property
    def kept_back(self) -> bool: ...
    @property
    def before_step(self) -> list[Callable[[], object]]: ...
    @property
    def stepped(self) -> bool: ...
    @property
    def changed(self) -> bool: ...
    def culprit(self) -> str:
        """Whose gradient was not finite first, or empty if unknown. All ranks call this."""

    def limit(self, micro_batch: int | None, batch_size: int) -> None:
        """Set the maximum number of samples in one pass; None: no maximum."""

    def micro_batches(self, batch: GlobalBatch) -> list[MicroBatch]: ...
    def begin(self, batch: GlobalBatch, guarded: bool) -> None: ...
    def begin_micro_batch(self, micro_batch: MicroBatch) -> None: ...
    def end_micro_batch(self) -> None: ...
    def end(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int: ...
    def settle(self) -> None:
        """Call before anything but another step. Raises BadInput if a number was not finite."""


def make_steps(
    order: FragmentOrder,
    prepared: Prepared,
    peers: Peers,
    division: Division,
    clip_grad_norm: float | None,
    find_unused_parameters: bool,
    device: torch.device,
    in_hook: Callable[[], bool],
) -> Steps:
    """The order's mode; ``in_hook``: a function given to the context runs."""
    mode = order.spec.mode
    if isinstance(mode, Reproducible) and order.spec.sharded:
        # Only here, as it imports FSDP2.
        from parsl_freetrain.training.steps.sharded_reproducible import ShardedReproducibleSteps

        what = order.spec.shards, clip_grad_norm, device, in_hook
        return ShardedReproducibleSteps(prepared, peers, division, *what)
    if isinstance(mode, Reproducible):
        speeds = [speed for speed in order.speeds for _ in range(order.per_node)]
        policy = NonFinitePolicy(
            mode.on_nan, f'Trainer {order.trainer!r}, fragment {order.fragment}'
        )
        stop = policy.kept_back if mode.on_nan == STOP else None
        how = clip_grad_norm, device, in_hook, speeds, stop
        return ReproducibleSteps(prepared, peers, order.spec.shards, *how)
    return ThroughputSteps(
        prepared,
        peers,
        division,
        clip_grad_norm,
        find_unused_parameters,
        device,
        adasum=isinstance(mode, Scaled) and mode.combine == ADASUM,
    )
