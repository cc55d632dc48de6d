"""The modes of training: how turns of the user's loop make up the steps of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from parsl_freetrain.training.data import Turn
from parsl_freetrain.training.division import Division
from parsl_freetrain.training.fragment import REPRODUCIBLE, SCALED, FragmentOrder
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.prepared import Prepared
from parsl_freetrain.training.reproducible import ReproducibleSteps
from parsl_freetrain.training.sampling import GlobalBatch
from parsl_freetrain.training.scaled import ADASUM
from parsl_freetrain.training.throughput import ThroughputSteps


class Steps(Protocol):
    """One mode.

    Attributes
    ----------
    delay
        So many batches may pass from a wish to the decision.
    kept_back
        Whether the last batch made no step because its gradient was not finite.
    """

    @property
    def delay(self) -> int: ...
    @property
    def models(self) -> tuple[torch.nn.Module, ...]: ...
    @property
    def optimizers(self) -> tuple[Any, ...]: ...
    @property
    def schedulers(self) -> tuple[Any, ...]: ...
    @property
    def kept_back(self) -> bool: ...
    def culprit(self) -> str:
        """Whose gradient was not finite first, for a sentence; empty: unknown. All ranks must call it."""
        ...
    def turns(self, batch: GlobalBatch) -> list[Turn]: ...
    def begin(self, batch: GlobalBatch, guarded: bool) -> None: ...
    def begin_turn(self, turn: Turn) -> None: ...
    def end_turn(self) -> None: ...
    def end(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int: ...


def make_steps(order: FragmentOrder, prepared: Prepared, peers: Peers, division: Division, clip_grad_norm: float | None,
               find_unused_parameters: bool, device: torch.device) -> Steps:
    """What the order's mode asks for."""
    if order.mode == REPRODUCIBLE:
        return ReproducibleSteps(prepared, peers, order.shards, clip_grad_norm, device)
    return ThroughputSteps(prepared, peers, division, clip_grad_norm, find_unused_parameters, device,
                           adasum=order.mode == SCALED and order.scaled.combine == ADASUM)
