"""What a rank can ask and say about its fragment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.loop.rank_parts import LoopState, RankParts
from parsl_freetrain.training.loop.reports import Reports
from parsl_freetrain.training.spec.messages import StateUsed
from parsl_freetrain.training.spec.retention import BEST
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps import lr
from parsl_freetrain.training.steps.mesh import Division


class FragmentView:
    """One fragment as one of its ranks sees it: the part that needs no model.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment.
    rank, world_size, local_rank, nodes
        This rank among all ranks and on its node, the number of ranks, and the number of nodes.
    device
        The device of models and batches.
    samples
        Number of training samples so far, over all fragments and ranks.
    total_samples
        Number of samples to train; None until :meth:`loop` knows it, if the total is in epochs.
    epoch
        The current epoch, from 0.
    stopped
        Whether the fragment ended before the total.
    state
        The user's own dict, saved in every checkpoint. It must be valid JSON; rank 0's dict is
        saved.
    """

    def __init__(self, parts: RankParts) -> None:
        order, place, saved = parts.order, parts.place, parts.saved
        self._parts, self._order, self._saved = parts, order, saved
        self._peers, self._checkpointer = parts.peers, parts.checkpointer
        self.trainer, self.fragment, self.device = order.trainer, order.fragment, parts.device
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.nodes = place.local_rank, place.nodes
        self._division = Division(order, place, parts.device)
        samples = saved.position.samples if saved is not None else 0
        total_samples = order.spec.total_samples
        if saved is not None and total_samples is None:
            total_samples = saved.position.total_samples
        last = self._checkpointer.last
        # 'best' belongs to the checkpoints for which ctx.checkpoint was called.
        metrics = {
            name: value
            for name, value in (last.metrics if last is not None else {}).items()
            if name != BEST
        }
        self._state = LoopState(
            samples,
            total_samples,
            reached=samples,
            reports=Reports(metrics),
            user=dict(saved.position.user) if saved is not None else {},
            epoch=saved.position.epoch if saved is not None else 0,
            finishing=saved.position.finishing if saved is not None else '',
        )

    @property
    def spec(self) -> TrainingSpec:
        """The trainer's settings."""
        return self._order.spec

    @property
    def samples(self) -> int:
        return self._state.samples

    @property
    def total_samples(self) -> int | None:
        return self._state.total_samples

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The last reported metrics. At the end of an epoch these are means over its last global
        batch, the same on all ranks.
        """
        return dict(self._state.metrics)

    @property
    def stopped(self) -> bool:
        return self._state.stopped

    @property
    def state(self) -> dict[str, Any]:
        self._use_state()
        return self._state.user

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        if not isinstance(value, dict):
            raise BadInput(
                f'ctx.state was set to {value!r}; it is a dict: set its entries, as in '
                "ctx.state['name'] = value."
            )
        self._use_state()
        self._state.user = value

    def _use_state(self) -> None:
        if not self._state.used and self.is_main:
            self._parts.channel.send(StateUsed())
        self._state.used = True

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def shape(self) -> Shape:
        """How the ranks of this fragment share the work. If the trainer has no ``shapes``, every
        rank trains its own samples.
        """
        return self._division.shape

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's DeviceMesh, with the dimensions
        :data:`~parsl_freetrain.core.model.types.MESH`. Ranks count along the last dimension first.

        The mesh and its process groups are created on first use. All ranks must use it first at the
        same point of the function.
        """
        return self._division.mesh

    def time_left(self) -> float:
        """Seconds until the nodes are taken away; infinite if unknown."""
        return self._checkpointer.timing.time_left()

    def should_stop(self) -> bool:
        """Whether this rank knows of a reason to stop. The loop stops by itself; only long work
        outside of it needs to ask.
        """
        return self._parts.inbox.stop_requested() or self._checkpointer.must_stop(1)

    def samples_lr(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """A learning rate scheduler by samples instead of steps, so that the schedule is the same
        for any number of nodes.

        Parameters
        ----------
        optimizer
            The optimizer, before :meth:`prepare`.
        factor
            A function of the number of samples seen before a batch, by all ranks in all fragments.
            It returns the factor by which the initial learning rate is multiplied in that batch.

        Returns
        -------
        torch.optim.lr_scheduler.LambdaLR
            Pass it to :meth:`prepare`, and call its ``step()`` once per batch, after the
            optimizer's.
        """
        return lr.by_samples(optimizer, factor, lambda: self._state.reached)

    def report(self, **metrics: float) -> None:
        """Report numbers by name; they are shown, recorded and saved with checkpoints.

        Of what is reported in the body of the loop, the mean over the last global batch counts:
        over all virtual shards or ranks, weighted by their samples. Elsewhere, for instance in
        functions given to :meth:`~FragmentContext.each_epoch`, the value of rank 0 counts. Raises
        TypeError if a value is not a number.
        """
        for name, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                self._state.reports.put(name, float(value))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                raise TypeError(
                    f'ctx.report was given {name}={value!r}, a {type(value).__name__}; '
                    'it takes numbers, as of float.'
                ) from None
