"""One stage of a pipeline on one worker: forward and backward passes of single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parsl_freetrain.core.model.errors import BadInput


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
        """Add to the parameters' gradients; returns that of the input, None at the first stage.
        ``gradient``: of the output; None at the last stage, whose output is the loss.
        """
        value, output = self._kept.pop(micro_batch)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if self._first:
            return None
        return value.grad if value.grad is not None else torch.zeros_like(value)

    def forget(self) -> None:
        """Drop what an unfinished batch has left."""
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
    """Make layers by their numbers, on which alone their initial weights depend. Raises BadInput if
    a layer uses statistics of the batch, which in a pipeline would be those of micro-batches.
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
