"""An ``AveragedModel`` of torch that was given to ``ctx.prepare``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim.swa_utils import AveragedModel

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers


class PreparedAverage:
    """Updates an AveragedModel once per global batch, after the step, when the body of the loop
    calls its ``update_parameters``. Outside of the body that acts at once, on all ranks.

    Parameters
    ----------
    average
        The averaged model; its ``update_parameters`` is replaced.
    models
        The prepared models, of which it averages one.
    in_micro_batch
        Whether the body of the loop is running.

    Raises
    ------
    BadInput
        If it cannot be said of which model it is the average.
    """

    def __init__(
        self,
        average: AveragedModel,
        models: Sequence[torch.nn.Module],
        peers: Peers,
        in_micro_batch: Callable[[], bool],
    ) -> None:
        sources = [model for model in models if _shapes(model) == _shapes(average.module)]
        if len(sources) != 1:
            raise BadInput(
                f'ctx.prepare was given an AveragedModel and {len(sources)} models with its '
                'parameters: give it the one model of which it is the average, or use '
                'ctx.ema(model, decay).'
            )
        self._source = sources[0]
        self._peers, self._in_micro_batch = peers, in_micro_batch
        self._update = average.update_parameters
        average.update_parameters = self._called  # type: ignore[method-assign]
        self._called_now = False
        self._each_step: bool | None = None
        self._agreed = False

    def _called(self, model: torch.nn.Module) -> None:
        if self._in_micro_batch():
            self._called_now = True
        else:
            self._update(model)

    def end_micro_batch(self) -> None:
        """Call after a micro-batch. Raises BadInput if it was called in this micro-batch and not in
        the first one, or the other way round.
        """
        called, self._called_now = self._called_now, False
        if self._each_step is None:
            self._each_step = called
        elif called != self._each_step:
            raise BadInput(
                'The body of ctx.loop called update_parameters of an AveragedModel in some '
                'iterations and not in others: call it in every iteration, or, to average less '
                'often, in a function that is given to ctx.after_step or ctx.each_epoch.'
            )

    def after_step(self) -> None:
        """Call after each step, on all ranks."""
        if not self._agreed:  # a rank may have had no micro-batch in the first batch
            self._each_step = bool(self._peers.all_reduce_max((bool(self._each_step),))()[0])
            self._agreed = True
        if self._each_step:
            self._update(self._source)


def _shapes(model: torch.nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters()]
