"""One stage of a pipeline at one worker: forward and backward passes of single micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parsl_freetrain.core.errors import BadInput


class Stage:
    """Some consecutive layers.

    Parameters
    ----------
    layers
        At least one.
    first, last
        Whether its input is that of the model, and its output.
    """

    def __init__(self, layers: Sequence[nn.Module], *, first: bool, last: bool) -> None:
        self._layers = tuple(layers)
        self._first = first
        self._last = last
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def kept(self) -> int:
        """Of how many micro-batches it keeps activations."""
        return len(self._kept)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that are trained, in the same order at each worker that has the stage."""
        return (p for layer in self._layers for p in layer.parameters() if p.requires_grad)

    def forward(self, micro_batch: int, value: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """The output for a micro-batch, of which the last stage makes the loss; the graph is kept until :meth:`backward`."""
        if not self._first:
            value = value.requires_grad_(value.is_floating_point() or value.is_complex())
        output = through(self._layers, value)
        if self._last:
            output = loss(output)
        self._kept[micro_batch] = (value, output)
        return output.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the parameters' gradients; returns the gradient of the input, None at the first stage.

        Parameters
        ----------
        gradient
            That of the output; None at the last stage, whose output is the loss.
        """
        value, output = self._kept.pop(micro_batch)
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if self._first:
            return None
        return value.grad if value.grad is not None else torch.zeros_like(value)

    def forget(self) -> None:
        """Drop what a batch that did not come to its end has left."""
        self._kept.clear()

    def output_like(self, value: Tensor) -> Tensor:
        """A tensor on the meta device, which has a shape and a type and no content, for one like it."""
        with torch.no_grad(), torch.device('meta'):
            for layer in self._layers:
                state = {name: tensor.to('meta') for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
                value = torch.func.functional_call(layer, state, (value,))
        return value


def through(layers: Sequence[nn.Module], value: Tensor) -> Tensor:
    """The output of layers one behind the other."""
    for layer in layers:
        value = layer(value)
    return value


def make_layers(makers: Sequence[Callable[[], nn.Module]], wanted: Sequence[int], seed: int) -> dict[int, nn.Module]:
    """Make some layers by their numbers, with the same initial weights wherever and together with whichever others a layer is made.

    Raises
    ------
    BadInput
        If a layer takes statistics over the batch, which it would take over micro-batches in a pipeline.
    """
    layers = {}
    for number in wanted:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((seed * 1_000_003 + number) % 2**63)
            layer = layers[number] = makers[number]()
        if any(isinstance(module, _BatchNorm) for module in layer.modules()):
            raise BadInput(f'Layer {number} has batch norm, whose statistics would be those of micro-batches in a pipeline: '
                           f'use LayerNorm or GroupNorm.')
    return layers
