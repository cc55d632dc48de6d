"""The buffers of models, such as running statistics, which forward passes change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from parsl_freetrain.core.model.errors import BadInput


class Buffers:
    """Remembers the buffers of models, and undoes what was done to them. A forward pass may also
    put other tensors in their places (``self.mean = ...``).

    Attributes
    ----------
    floating, integers
        Those of floating-point types (complex ones as pairs of numbers), and the others.
    before
        The ones of ``floating``, as they were when :meth:`remember` was called.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._places = [
            (module, name, buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.floating: list[torch.Tensor] = []
        self.integers: list[torch.Tensor] = []
        for buffer in {id(buffer): buffer for _, _, buffer in self._places}.values():
            if buffer.is_complex():
                self.floating.append(torch.view_as_real(buffer))
            else:
                (self.floating if buffer.is_floating_point() else self.integers).append(buffer)
        self.before: list[torch.Tensor] = []
        self._integers_before: list[torch.Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Copy all buffers."""
        self.before = [buffer.clone() for buffer in self.floating]
        self._integers_before = [buffer.clone() for buffer in self.integers]

    @torch.no_grad()
    def undo(self) -> None:
        """Make all buffers what they were when :meth:`remember` was called."""
        self.take()
        for buffer, old in self._pairs():
            buffer.copy_(old)

    def changed(self) -> Iterator[torch.Tensor]:
        """The buffers that are not what they were when :meth:`remember` was called."""
        return (buffer for buffer, old in self._pairs() if not torch.equal(buffer, old))

    @torch.no_grad()
    def take(self) -> None:
        """Call after a forward pass: copy tensors that are in the places of buffers into them.
        Raises BadInput if such a tensor has another shape or type.
        """
        for module, name, buffer in self._places:
            now = module._buffers.get(name)
            if now is buffer:
                continue
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                other = 'nothing' if now is None else f'one of {tuple(now.shape)} and {now.dtype}'
                raise BadInput(
                    f'The buffer {name!r} of a {type(module).__name__} has shape '
                    f'{tuple(buffer.shape)} and type {buffer.dtype}, and the body of ctx.loop has '
                    f'put {other} in its place: keep shape and type.'
                )
            buffer.copy_(now)
            module._buffers[name] = buffer

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        before = (*self.before, *self._integers_before)
        return zip((*self.floating, *self.integers), before, strict=True)
