"""Averages of models, saved with every checkpoint: ``ctx.ema``, and torch's AveragedModel."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.optim.swa_utils import AveragedModel

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.training.checkpoint.state import Saved, Source, restore_average
from parsl_freetrain.training.comm.peers import Peers, on_any_rank
from parsl_freetrain.training.loop.packing import alike
from parsl_freetrain.training.loop.rank_parts import Model
from parsl_freetrain.training.steps.buffers import copy_all


class MovingAverage:
    """The exponential moving average of a model, updated after each step::

        average = decay * average + (1 - decay) * parameter

    Buffers are copied. ``model``, a copy of the model that is never trained, holds the average,
    which begins with the model's parameters. Raises BadInput if the decay is not from 0 to 1, or
    the model cannot be copied.
    """

    def __init__(self, source: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay <= 1:
            refuse('The decay given to ctx.ema', decay, 'from 0 to 1')
        self._source = source
        self._decay = decay
        try:
            self.model = copy.deepcopy(source)
        except (RuntimeError, TypeError) as error:
            raise BadInput(
                f'ctx.ema cannot copy the model, a {type(source).__name__} ({error}).'
            ) from error
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self) -> None:
        averaged = list[tuple[torch.Tensor, torch.Tensor]]()
        copied = [*zip(self.model.buffers(), self._source.buffers(), strict=True)]
        for mine, its in zip(self.model.parameters(), self._source.parameters(), strict=True):
            kind = averaged if mine.is_floating_point() or mine.is_complex() else copied
            kind.append((mine, its.detach().to(mine.dtype)))
        if averaged:
            means, others = zip(*averaged, strict=True)
            torch._foreach_lerp_(means, others, 1 - self._decay)
        if copied:
            copy_all(*zip(*copied, strict=True))


class PreparedAverage:
    """Updates an AveragedModel after the step whenever the body has called ``update_parameters``;
    outside of it at once. BadInput if it is not known of which model it is.
    """

    def __init__(
        self,
        average: AveragedModel,
        models: Sequence[torch.nn.Module],
        peers: Peers,
        in_body: Callable[[], bool],
    ) -> None:
        sources = [model for model in models if alike(model, average.module)]
        if len(sources) != 1:
            raise BadInput(
                f'ctx.prepare was given an AveragedModel and {len(sources)} models with its '
                'parameters: give it the one model of which it is the average, or use '
                'ctx.ema(model, decay).'
            )
        self._source = sources[0]
        self._peers, self._in_body = peers, in_body
        self._update = average.update_parameters
        average.update_parameters = self._called  # type: ignore[method-assign]
        self._called_now = False
        self._each_step: bool | None = None
        self._agreed = False

    def _called(self, model: torch.nn.Module) -> None:
        if self._in_body():
            self._called_now = True
        else:
            self._update(model)

    def end_micro_batch(self) -> None:
        """Raises BadInput if it was called here and not in the first micro-batch, or vice versa."""
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
        if not self._agreed:  # a rank may have had no micro-batch in the first batch
            self._each_step = on_any_rank(self._peers, bool(self._each_step))
            self._agreed = True
        if self._each_step:
            self._update(self._source)


def take_averages(
    model: Model, peers: Peers, in_body: Callable[[], bool], *, fresh: bool
) -> list[PreparedAverage]:
    """Update prepared averages after each step. ``fresh``: not restored."""
    taken = []
    for average in model.prepared.averages:
        assert isinstance(average, AveragedModel)
        _check_whole(model)
        if fresh:
            tensors = (*average.parameters(), *average.buffers())
            model.division.make_equal((tensor.data for tensor in tensors), peers)
        taken.append(PreparedAverage(average, model.prepared.models, peers, in_body))
        model.hooks.averages.append(taken[-1].after_step)
    return taken


def with_moving_average(
    model: Model, averaged: torch.nn.Module, decay: float, saved: Source | None
) -> tuple[Model, torch.nn.Module]:
    """The model with one more average, and that average; as of ``ctx.ema``."""
    if not any(averaged is one for one in model.prepared.models):
        raise BadInput('ctx.ema was given a model that was not given to ctx.prepare.')
    _check_whole(model)
    average, before = MovingAverage(averaged, decay), model.prepared.averages
    if isinstance(saved, Saved):
        restore_average(average.model, saved, len(before))
    model.hooks.averages.append(average.update)
    prepared = replace(model.prepared, averages=(*before, average.model))
    return replace(model, prepared=prepared), average.model


def _check_whole(model: Model) -> None:
    if not model.division.whole:
        raise BadInput(
            'A model that is divided among ranks cannot be averaged: leave out its average, or '
            'give the trainer shapes that divide only the data.'
        )
