"""A model in stages at several ranks, trained by any schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training.parallel.micro_batches import MicroBatches
from parsl_freetrain.training.parallel.schedule import DOWN, FORWARD, PipelineSchedule, Task, make_schedule, split_layers
from parsl_freetrain.training.parallel.schedule_steps import programs_of
from parsl_freetrain.training.parallel.stage import Stage, make_layers, through
from parsl_freetrain.training.parallel.traffic import Traffic, outputs_like


class Pipeline(nn.Module):
    """This rank's stages of a model of layers one behind the other.

    Its parameters are called ``layers.NUMBER.…`` by the numbers of the layers, however many stages there are. Give it to
    ``ctx.prepare``, and use :meth:`step` in place of forward pass and ``backward()``. It trains as one process does that computes the
    gradient of the whole batch at once, up to the order of sums. (Random numbers in layers, such as dropout's, differ.)

    Parameters
    ----------
    makers
        A function for each layer that makes it; a layer takes one tensor and gives one. A rank makes its own layers only.
    loss
        ``loss(output, targets)``, a mean over samples.
    method
        'gpipe', '1f1b' or 'chimera'; it does not matter where there is one stage.
    micro_batches
        What a batch is cut into; their sizes may differ by 1.
    group
        The ranks of the pipeline, such as ``ctx.mesh.get_group('pipeline')``; as many stages as ranks. None: one stage.
    seed
        Of the initial weights: layer by layer, so that these do not depend on the number of stages.
    device
        Where the layers are.

    Attributes
    ----------
    schedule
        What is run.
    most_kept
        Of how many micro-batches this rank has kept a stage's activations at a time in the last batch, at most.

    Raises
    ------
    BadInput
        If the method cannot do with so many stages or micro-batches, or there are fewer layers than stages.
    """

    many_backward_passes = True   # so that ctx.prepare leaves averaging to the optimizer's step

    def __init__(self, makers: Sequence[Callable[[], nn.Module]], loss: Callable[[Tensor, Tensor], Tensor], *, method: str = 'chimera',
                 micro_batches: int = 4, group: ProcessGroup | None = None, seed: int = 0, device: torch.device | str = 'cpu') -> None:
        super().__init__()
        stages = group.size() if group is not None else 1
        # One stage has no pipeline; 1F1B then computes one micro-batch after the other.
        self.schedule: PipelineSchedule = make_schedule(method if stages > 1 else '1f1b', stages, micro_batches)
        self.most_kept = 0
        self._group, self._loss, self._device = group if stages > 1 else None, loss, torch.device(device)
        rank = dist.get_rank(group) if stages > 1 else 0
        self._program = programs_of(self.schedule)[rank]
        parts = split_layers(len(makers), stages)
        held = self.schedule.held(rank)
        made = make_layers(makers, [number for _, stage in held for number in parts[stage]], seed)
        self.layers = nn.ModuleDict({str(number): layer.to(self._device) for number, layer in sorted(made.items())})
        self._stages = {(direction, stage): Stage([made[number] for number in parts[stage]], first=stage == 0, last=stage == stages - 1)
                        for direction, stage in held}
        # Who else has a stage: in a schedule of two directions, the worker that has it in the other one.
        both = len({direction for direction, _ in held}) > 1
        self._partners = {held: self.schedule.worker(held[1], 1 - held[0]) for held in self._stages} if both else {}
        self._between: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        """What the model makes of its inputs; for one stage only, and no part of training.

        Raises
        ------
        BadInput
            If this rank has not all layers.
        """
        if self._group is not None:
            raise BadInput(f'No rank of a pipeline of {self.schedule.stages} stages has all layers: to use the model, load its weights '
                           f'into a Pipeline without a group.')
        return through(tuple(self.layers.values()), inputs)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass of a batch. Parameters have its gradient then, and nothing of an earlier one.

        Parameters
        ----------
        inputs, targets
            Of shapes (samples, ...); the same at all ranks of the pipeline.

        Returns
        -------
        Tensor
            The loss, a mean over the batch; at all ranks.

        Raises
        ------
        BadInput
            If a stage gives something that cannot be sent.
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
        """With whom gradients are added up that are complete now, and of which parameters; None where there are none."""
        if complete is None or complete not in self._partners:
            return None
        parameters = list(self._stages[complete].parameters())
        return (self._partners[complete], parameters) if parameters else None

    def _compute(self, task: Task, batch: MicroBatches, traffic: Traffic | None) -> Tensor | None:
        stage = self._stages[task.direction, task.stage]
        before = self.schedule.fed_by(task)
        given = traffic.take(before) if traffic is not None and before is not None else None
        if task.kind != FORWARD:
            return stage.backward(task.micro_batch, given)
        made = stage.forward(task.micro_batch, batch.inputs[task.micro_batch] if given is None else given,
                             lambda output: self._loss(output, batch.targets[task.micro_batch]) * batch.weights[task.micro_batch])
        if task.stage == self.schedule.stages - 1:
            batch.loss += made
        self.most_kept = max(self.most_kept, sum(other.kept for other in self._stages.values()))
        return made

    def _traffic(self, batch: MicroBatches) -> Traffic | None:
        if self._group is None:
            return None
        for value in batch.inputs:
            # Found out again where the last batch of an epoch is smaller.
            if (value.shape, value.dtype) not in self._between:
                stage = self._stages[DOWN, dist.get_rank(self._group)]
                self._between[value.shape, value.dtype] = outputs_like(stage, value, self._group, self._device)
        return Traffic(self._group, [self._between[value.shape, value.dtype] for value in batch.inputs], self._device)
