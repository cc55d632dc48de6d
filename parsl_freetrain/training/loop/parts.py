"""What the training loop of a rank works with, and the progress that it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.collectives import Peers
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.data.order import GlobalOrder
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.hooks import Hooks
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.messages import ToRank
from parsl_freetrain.training.spec.order import FragmentOrder, RankPlace
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.modes import Steps
from parsl_freetrain.training.steps.nonfinite import Watch


@dataclass(frozen=True)
class RankParts:
    """What a rank trains with.

    Attributes
    ----------
    order, place
        The rank's instructions.
    peers, channel, inbox
        Connections to the other ranks and to the node agent.
    checkpointer
        Writes checkpoints and knows the last one.
    device
        The device of models and batches.
    saved
        The state to continue from; None at the beginning of the training.
    """

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
    hooks: Hooks


@dataclass(frozen=True)
class BatchSource:
    """The arguments of :meth:`FragmentContext.loop`."""

    order: GlobalOrder
    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int


@dataclass
class LoopState:
    """The progress of the training.

    Attributes
    ----------
    samples, total_samples
        Number of samples so far, and in total (None: not known yet).
    reached
        Number of samples at the end of the current global batch.
    metrics, user
        What the user has reported, and the user's own dict.
    epoch, last_of_epoch
        The epoch of the current global batch, and whether it is the last batch of that epoch.
    complete, stopped
        Whether the total was reached, and whether the fragment ended before that.
    saved_extras
        :meth:`extras` of the last checkpoint.
    """

    samples: int
    total_samples: int | None
    reached: int
    metrics: dict[str, float]
    user: dict[str, Any]
    epoch: int = 0
    last_of_epoch: bool = False
    complete: bool = False
    stopped: bool = False
    saved_extras: str = ''

    def extras(self) -> str:
        """Metrics and the user's dict as JSON.

        Raises
        ------
        BadInput
            If the dict holds something that JSON cannot express.
        """
        try:
            return json.dumps([self.metrics, self.user], sort_keys=True)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f'ctx.state cannot be saved ({error}): keep texts, numbers, lists and dicts in it.'
            ) from error
