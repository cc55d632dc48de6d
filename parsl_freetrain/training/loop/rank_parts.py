"""What the training loop of a rank works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.loop_hooks import LoopHooks
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import ToRank
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
    hooks: LoopHooks
