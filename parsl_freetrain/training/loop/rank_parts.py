"""What a rank's training loop works with, and what the user wants done around steps and epochs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.module_state import ModuleState, Structure
from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.carried import Carried
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import ToRank
from parsl_freetrain.training.steps.ddp import ThroughputSteps
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.nonfinite import Watch
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps

Hook = Callable[[], object]
Steps = ReproducibleSteps | ThroughputSteps
"""How passes of the user's loop make up a step. ``delay``: maximum number of batches from a wish to
the decision. ``kept_back``: the last step was skipped because of its gradient. ``before_step``:
functions to call when the gradient is known. ``stepped``: an optimizer has been stepped.
``changed``: the last batch has begun to change what checkpoints hold, apart from buffers.
"""


@dataclass
class LoopHooks:
    """The functions that the user has registered, in order. Updates of averages come before
    ``after_step``; ``after_epoch`` is done after the user's functions.
    """

    before_step: list[Hook] = field(default_factory=list)
    averages: list[Hook] = field(default_factory=list)
    after_step: list[Hook] = field(default_factory=list)
    each_epoch: list[Hook] = field(default_factory=list)
    after_epoch: list[Hook] = field(default_factory=list)
    running: bool = False
    by_epochs: bool = False

    @property
    def functions(self) -> list[Hook]:
        return [*self.before_step, *self.after_step, *self.each_epoch]

    @property
    def at_step_end(self) -> list[Hook]:
        return [*self.averages, *self.after_step]

    @property
    def at_epochs(self) -> bool:
        return bool(self.each_epoch or self.after_epoch or self.by_epochs)

    def add(self, name: str, function: Any, *, in_body: bool) -> None:
        """Raises BadInput in the body of the loop, or if the function is none."""
        if not callable(function):
            raise BadInput(
                f'ctx.{name} was given a {type(function).__name__}; it takes a function without '
                f'arguments, such as ctx.{name}(lambda: ...).'
            )
        if in_body:
            raise BadInput(
                f'ctx.{name} was called in the body of ctx.loop, where each iteration would add '
                'the function once more: call it before the loop.'
            )
        getattr(self, name).append(function)

    def check_shared(self, model: 'Model | None') -> None:
        """Raises BadInput if ``before_step`` could not show the gradients of all optimizers."""
        if self.before_step and model is not None and getattr(model.steps, 'shares', False):
            raise BadInput(
                'ctx.before_step cannot show the gradients of parameters that several optimizers '
                'step, each with its own: leave it out, or give each parameter to one optimizer.'
            )

    def run(self, hooks: list[Hook]) -> None:
        self.running = True
        try:
            for hook in hooks:
                hook()
        finally:
            self.running = False


@dataclass(frozen=True)
class RankParts:
    order: FragmentOrder
    place: RankPlace
    peers: Peers
    channel: Channel[ToRank]
    inbox: Inbox
    checkpointer: Checkpointer
    device: torch.device
    saved: Source | None


@dataclass(frozen=True)
class Model:
    """The trained models, the way in which they take a step, and what the user does around it."""

    prepared: Prepared
    division: Division
    steps: Steps
    watch: Watch
    hooks: LoopHooks
    modules: ModuleState
    structure: Structure
    carried: Carried
