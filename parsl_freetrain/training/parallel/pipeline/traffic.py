"""Messages of a pipeline: activations, their gradients, gradients to be summed by two workers."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.nn.modules.batchnorm import _BatchNorm

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.pipeline.schedule import FORWARD, StageTransfer, Task


class Stage:
    """Some consecutive layers, at least one. ``first``, ``last``: it is that stage of the model."""

    def __init__(self, layers: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        self._layers = tuple(layers)
        self._first, self._last = first, last
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def kept(self) -> int:
        return len(self._kept)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters, in the same order on each worker that has the stage."""
        return (p for layer in self._layers for p in layer.parameters() if p.requires_grad)

    def forward(self, micro_batch: int, value: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """The output for a micro-batch, or the last stage's loss; keeps the graph."""
        if not self._first:
            value = value.requires_grad_(value.is_floating_point() or value.is_complex())
        output = through(self._layers, value)
        if self._last:
            output = loss(output)
        self._kept[micro_batch] = (value, output)
        return output.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the gradients; returns the input's, if any. ``gradient`` None: of the loss."""
        value, output = self._kept.pop(micro_batch)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if self._first:
            return None
        return value.grad if value.grad is not None else torch.zeros_like(value)

    def forget(self) -> None:
        self._kept.clear()

    def output_like(self, value: Tensor) -> Tensor:
        """The output for an input on the meta device: shapes and types without content."""
        with torch.no_grad(), torch.device('meta'):
            for layer in self._layers:
                state = {
                    name: tensor.to('meta')
                    for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
                }
                value = torch.func.functional_call(layer, state, (value,))
        return value


def through(layers: Sequence[nn.Module], value: Tensor) -> Tensor:
    for layer in layers:
        value = layer(value)
    return value


def make_layers(
    makers: Sequence[Callable[[], nn.Module]], wanted: Sequence[int], seed: int
) -> dict[int, nn.Module]:
    """Make layers by their numbers, on which alone their weights depend. BadInput: batch
    statistics.
    """
    layers = {}
    for number in wanted:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed * 1_000_003 + number) % 2**63)
            layer = layers[number] = makers[number]()
        if any(isinstance(module, _BatchNorm) for module in layer.modules()):
            raise BadInput(
                f'Layer {number} has batch norm, whose statistics would be those of micro-batches '
                'in a pipeline: use LayerNorm or GroupNorm.'
            )
    return layers


_TYPES: tuple[torch.dtype, ...] = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.complex64, torch.int64, torch.int32, torch.uint8),
)
_MOST_DIMENSIONS = 8
_SENDING_AT_MOST = 8


class Traffic:
    """A worker's messages of a batch; ``between``: by micro-batch and stage, like outputs."""

    def __init__(
        self, group: ProcessGroup, between: Sequence[Sequence[Tensor]], device: torch.device
    ) -> None:
        self._group, self._between, self._device = group, between, device
        self._arriving: dict[Task, tuple[Tensor, Work]] = {}
        self._sending: deque[Work] = deque()
        self._sums: list[tuple[list[nn.Parameter], Tensor, Tensor, Work]] = []

    def take(self, made_by: Task) -> Tensor:
        """Wait for the result of another worker's task, and return it."""
        value, work = self._arriving.pop(made_by)
        work.wait()
        return value

    def exchange(
        self,
        receives: Sequence[StageTransfer],
        sends: Sequence[StageTransfer],
        value: Tensor | None,
        complete: tuple[int, list[nn.Parameter]] | None,
    ) -> None:
        """Begin to receive and send the results of one slot; ``value``: what ``sends`` has;
        ``complete``: another worker and parameters whose gradients :meth:`finish` sums.
        """
        # Receives first, in one call: neither gloo nor NCCL, which keeps the order, waits for ever.
        like = map(self._like, receives)
        incoming = [torch.empty_like(one, device=self._device) for one in like]
        ops = [
            self._op(dist.irecv, buffer, message.source)
            for message, buffer in zip(receives, incoming, strict=True)
        ]
        if sends:
            assert value is not None
            ops += [self._op(dist.isend, value.contiguous(), message.target) for message in sends]
        if complete is not None:
            partner, parameters = complete
            gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            own = torch.cat([gradient.flatten() for gradient in gradients])
            others = torch.empty_like(own)
            ops += [self._op(dist.isend, own, partner), self._op(dist.irecv, others, partner)]
        if not ops:
            return
        works = dist.batch_isend_irecv(ops)
        if len(works) < len(ops):  # the backend may complete all of them as one
            works = works * len(ops)
        for message, buffer, work in zip(receives, incoming, works, strict=False):
            self._arriving[message.task] = (buffer, work)
        if complete is not None:
            self._sums.append((parameters, own, others, works.pop()))
        self._sending.extend(works[len(receives) :])
        while len(self._sending) > _SENDING_AT_MOST:
            self._sending.popleft().wait()  # so that sent tensors are not kept to the end

    def finish(self) -> None:
        """Wait for all messages, and replace gradients by their sums."""
        while self._sending:
            self._sending.popleft().wait()
        for parameters, own, others, work in self._sums:
            work.wait()
            own += others  # a + b equals b + a to the last bit, so both workers have the same
            totals = own.split([p.numel() for p in parameters])
            for p, total in zip(parameters, totals, strict=True):
                p.grad = total.view_as(p).to(p.dtype)

    def _op(self, what: Callable[..., Any], tensor: Tensor, worker: int) -> dist.P2POp:
        return dist.P2POp(what, tensor, dist.get_global_rank(self._group, worker), self._group)

    def _like(self, message: StageTransfer) -> Tensor:
        """An empty tensor for a message; a gradient is like the output before its stage."""
        task = message.task
        stage = task.stage if task.kind == FORWARD else task.stage - 1
        return self._between[task.micro_batch][stage]


def outputs_like(
    stage: Stage, inputs: Tensor, group: ProcessGroup, device: torch.device
) -> list[Tensor]:
    """By stage except the last: a tensor without content like its output. All workers call this
    with their own stage of direction :data:`.schedule.DOWN`. BadInput for outputs that cannot be
    sent.
    """
    between: list[Tensor] = []
    value = inputs.to('meta')
    for worker in range(group.size() - 1):
        header = torch.zeros(2 + _MOST_DIMENSIONS, dtype=torch.int64)
        if dist.get_rank(group) == worker:
            output = stage.output_like(value)
            known_type = isinstance(output, Tensor) and output.dtype in _TYPES
            if not known_type or output.ndim > _MOST_DIMENSIONS:
                raise BadInput(
                    f'Stage {worker} of the pipeline gives {_described(output)} to the next one: a '
                    f'stage must give one tensor of at most {_MOST_DIMENSIONS} dimensions, of type '
                    f'{", ".join(map(str, _TYPES))}.'
                )
            known = [_TYPES.index(output.dtype), output.ndim, *output.shape]
            header[: 2 + output.ndim] = torch.tensor(known)
        header = header.to(device)
        dist.broadcast(header, group=group, group_src=worker)
        kind, dimensions, *shape = header.tolist()
        value = torch.empty(shape[:dimensions], dtype=_TYPES[kind], device='meta')
        between.append(value)
    return between


def _described(output: object) -> str:
    if not isinstance(output, Tensor):
        return f'a {type(output).__name__}'
    return f'a tensor of shape {tuple(output.shape)}, {output.dtype}'
