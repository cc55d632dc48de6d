"""What the training loop of a rank works with, and the progress that it keeps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.state import Source
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.data_loaders import LoaderData
from parsl_freetrain.training.data.loader import MicroBatch, make_loader
from parsl_freetrain.training.data.sample_order import GlobalBatch, GlobalOrder
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.hooks import Hooks
from parsl_freetrain.training.loop.reports import Reports
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
    hooks: Hooks


@dataclass(frozen=True)
class BatchSource:
    """The arguments of :meth:`FragmentContext.loop`.

    Attributes
    ----------
    order, dataset, read
        The order of the samples, what has them, and how it is read.
    base
        Samples that earlier loops of the function have trained; the order does not count them.
    """

    order: GlobalOrder
    dataset: Any
    read: LoaderData
    base: int

    @property
    def end(self) -> int:
        """Number of samples at the end of the loop."""
        return self.base + self.order.total_samples

    def batches(self, samples: int) -> Iterator[GlobalBatch]:
        """The global batches from a number of samples on."""
        for batch in self.order.batches(samples - self.base):
            yield replace(batch, samples_before=self.base + batch.samples_before)

    def loader(
        self, micro_batches: Iterable[MicroBatch], seed: int | None, device: torch.device
    ) -> Iterable[Any]:
        """The data of these micro-batches, as of :func:`make_loader`."""
        return make_loader(
            self.dataset,
            micro_batches,
            seed,
            self.read.collate_fn,
            self.read.num_workers,
            device,
            self.read.worker_init_fn,
        )

    def epochs_before(self, samples: int) -> int:
        """Number of epochs of this loop that have ended at this number of samples."""
        return (samples - self.base) // self.order.epoch_size

    def ends_epoch(self, samples: int) -> bool:
        """Whether an epoch of this loop ends at this number of samples."""
        return samples > self.base and (samples - self.base) % self.order.epoch_size == 0


@dataclass
class LoopState:
    """The progress of the training.

    Attributes
    ----------
    samples, total_samples
        Number of samples so far, and in total (None: not known yet).
    reached
        Number of samples at the end of the current global batch.
    reports, user, used
        What the user has reported, the user's own dict, and whether this fragment has used it.
    epoch
        The epoch of the current global batch.
    finishing, finished_early
        Why the training is to end before the total (empty: this rank does not want it), and whether
        all ranks have ended it.
    wants_checkpoint, best
        Whether a checkpoint is to be written at the end of this epoch, and the value by which the
        best one is chosen.
    at_epoch_end, epoch_due
        Whether what is done at the end of an epoch is being done, and whether it is still to be
        done.
    complete, stopped, finished
        Whether the loop has reached its end, whether the fragment ended before that, and whether
        the function has returned (in this or an earlier fragment).
    result
        What the function has returned, as JSON.
    """

    samples: int
    total_samples: int | None
    reached: int
    reports: Reports
    user: dict[str, Any]
    used: bool = False
    epoch: int = 0
    finishing: str = ''
    finished_early: bool = False
    wants_checkpoint: bool = False
    best: float | None = None
    at_epoch_end: bool = False
    epoch_due: bool = False
    complete: bool = False
    stopped: bool = False
    finished: bool = False
    result: str = ''

    @property
    def metrics(self) -> dict[str, float]:
        """The last known metrics."""
        return self.reports.values

    def count(self, what: str) -> None:
        """Add 1 to a metric."""
        self.metrics[what] = self.metrics.get(what, 0.0) + 1

    def user_text(self) -> str:
        """The user's dict as JSON. Raises BadInput if the dict holds something that JSON cannot
        express.
        """
        try:
            return json.dumps(self.user)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f'ctx.state cannot be saved ({error}): keep texts, numbers, lists and dicts in it.'
            ) from error
