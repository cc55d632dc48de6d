"""A model in stages on several ranks, trained by any schedule."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.pipeline import schedule as sc
from parsl_freetrain.training.parallel.pipeline import traffic as messages
from parsl_freetrain.training.parallel.pipeline.schedule import programs_of


class Pipeline(nn.Module):
    """This rank's stages of a model that is a sequence of layers.

    Parameters are named ``layers.NUMBER.…`` by the numbers of the layers, whatever the number of
    stages. Give it to ``ctx.prepare``, and use :meth:`step` instead of forward pass and
    ``backward()``. The result is that of one process that computes the gradient of the whole batch,
    up to the order of sums. (Random numbers in layers, such as those of dropout, differ.) Raises
    BadInput if the method does not support this number of stages or micro-batches, or there are
    fewer layers than stages.

    Parameters
    ----------
    makers
        For each layer a function that makes it. A layer takes one tensor and returns one. A rank
        makes only its own layers.
    loss
        ``loss(output, targets)``, a mean over samples.
    method
        'gpipe', '1f1b' or 'chimera'; not used if there is one stage.
    micro_batches
        Number of micro-batches per batch; their sizes may differ by 1.
    group
        The ranks of the pipeline, such as ``ctx.mesh.get_group('pipeline')``. There are as many
        stages as ranks. None: one stage.
    seed
        Seed of the initial weights. Each layer has its own, so that they do not depend on the
        number of stages.
    device
        Device of the layers.

    Attributes
    ----------
    schedule
        The schedule that is run.
    most_kept
        Maximum number of micro-batches whose activations this rank kept for a stage at a time, in
        the last batch.
    """

    many_backward_passes = True  # so that ctx.prepare leaves averaging to the optimizer's step

    def __init__(
        self,
        makers: Sequence[Callable[[], nn.Module]],
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        method: str = 'chimera',
        micro_batches: int = 4,
        group: ProcessGroup | None = None,
        seed: int = 0,
        device: torch.device | str = 'cpu',
    ) -> None:
        super().__init__()
        stages = group.size() if group is not None else 1
        # With one stage, 1F1B computes one micro-batch after the other.
        method = method if stages > 1 else '1f1b'
        self.schedule: sc.PipelineSchedule = sc.make_schedule(method, stages, micro_batches)
        self.most_kept = 0
        self._group, self._loss = group if stages > 1 else None, loss
        self._device = torch.device(device)
        rank = dist.get_rank(group) if stages > 1 else 0
        self._program = programs_of(self.schedule)[rank]
        parts = sc.split_layers(len(makers), stages)
        held = self.schedule.held(rank)
        made = messages.make_layers(
            makers, [number for _, stage in held for number in parts[stage]], seed
        )
        placed = {str(number): layer.to(self._device) for number, layer in sorted(made.items())}
        self.layers = nn.ModuleDict(placed)
        self._stages = {}
        for one in held:
            ends = {'first': one[1] == 0, 'last': one[1] == stages - 1}
            self._stages[one] = messages.Stage([made[number] for number in parts[one[1]]], **ends)
        # In a schedule of two directions: the worker with the same stage in the other direction.
        both = len({direction for direction, _ in held}) > 1
        worker, mine = self.schedule.worker, self._stages if both else ()
        self._partners = {held: worker(held[1], 1 - held[0]) for held in mine}
        self._between: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's output, for evaluation with one stage. BadInput if layers are elsewhere."""
        if self._group is not None:
            raise BadInput(
                f'No rank of a pipeline of {self.schedule.stages} stages has all layers: to use '
                'the model, load its weights into a Pipeline without a group.'
            )
        return messages.through(tuple(self.layers.values()), inputs)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass of a batch. It replaces the gradients of the parameters. Raises
        BadInput if a stage returns something that cannot be sent. Returns the loss, a mean over the
        batch, on all ranks.

        Parameters
        ----------
        inputs, targets
            Of shapes (samples, ...); the same on all ranks of the pipeline.
        """
        for parameter in self.parameters():
            parameter.grad = None
        for stage in self._stages.values():
            stage.forget()
        self.most_kept = 0
        batch = MicroBatches(inputs, targets, self.schedule.micro_batches, self._device)
        traffic = self._traffic(batch)
        for step in self._program:
            made = self._compute(step.task, batch, traffic) if step.task is not None else None
            if traffic is not None:
                traffic.exchange(step.receives, step.sends, made, self._shared(step.completes))
        if traffic is not None:
            traffic.finish()
            dist.all_reduce(batch.loss, group=self._group)
        return batch.loss

    def _shared(self, complete: tuple[int, int] | None) -> tuple[int, list[nn.Parameter]] | None:
        """A rank with which to sum gradients that are complete now, and their parameters."""
        if complete is None or complete not in self._partners:
            return None
        parameters = list(self._stages[complete].parameters())
        return (self._partners[complete], parameters) if parameters else None

    def _compute(
        self, task: sc.Task, batch: 'MicroBatches', traffic: messages.Traffic | None
    ) -> Tensor | None:
        stage, m = self._stages[task.direction, task.stage], task.micro_batch
        before = self.schedule.fed_by(task)
        given = traffic.take(before) if traffic is not None and before is not None else None
        if task.kind != sc.FORWARD:
            return stage.backward(m, given)
        made = stage.forward(
            m,
            batch.inputs[m] if given is None else given,
            lambda output: self._loss(output, batch.targets[m]) * batch.weights[m],
        )
        if task.stage == self.schedule.stages - 1:
            batch.loss += made
        self.most_kept = max(self.most_kept, sum(other.kept for other in self._stages.values()))
        return made

    def _traffic(self, batch: 'MicroBatches') -> messages.Traffic | None:
        if self._group is None:
            return None
        for value in batch.inputs:
            # Determined again if the batch size changes, as at the end of an epoch.
            if (value.shape, value.dtype) not in self._between:
                stage = self._stages[sc.DOWN, dist.get_rank(self._group)]
                like = messages.outputs_like(stage, value, self._group, self._device)
                self._between[value.shape, value.dtype] = like
        between = [self._between[value.shape, value.dtype] for value in batch.inputs]
        return messages.Traffic(self._group, between, self._device)


class MicroBatches:
    """The parts of a batch, and the sum of their losses so far; of too few samples, some are
    repeated with weight 0. ``weights``: shares of the batch, with which losses (means) are added.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, number: int, device: torch.device) -> None:
        samples = len(inputs)
        parts = torch.arange(max(samples, number), device=inputs.device).tensor_split(number)
        self.inputs, self.targets = (
            [values[part % samples] for part in parts] for values in (inputs, targets)
        )
        self.weights = [int((part < samples).sum()) / samples for part in parts]
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
