"""Lightning Fabric in fragments."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from parsl_freetrain.integrations.lightning_arguments import check_options, unsupported
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.loop.context import FragmentContext

_HOW = {
    'clip_gradients': 'say fabric.setup(..., clip_grad_norm=...)',
    'load': 'training goes on from its last checkpoint by itself',
    'no_backward_sync': 'to accumulate the gradients of n batches say fabric.loop(dataloader, n)',
    'save': 'the app writes checkpoints',
    'setup_dataloaders': 'give the DataLoader to fabric.loop',
    'setup_module': 'give model and optimizer to fabric.setup',
    'setup_optimizers': 'give model and optimizer to fabric.setup',
}


class Fabric:
    """Stands for ``lightning.fabric.Fabric`` in a fragment: the app has launched the ranks.

    ``setup`` is ``ctx.prepare``. In place of the loops over epochs and over what
    ``setup_dataloaders`` gives, there is ``for batch in fabric.loop(dataloader)``. Raises BadInput
    if an argument asks for what is not supported here.

    Parameters
    ----------
    ctx
        The fragment context.
    precision
        '32-true' or 'bf16-mixed'; for the latter, put the forward pass under ``autocast()``.
    **options
        Other arguments of ``lightning.fabric.Fabric``.
    """

    def __init__(self, ctx: FragmentContext, *, precision: Any = '32-true', **options: Any) -> None:
        check_options('Fabric', ctx, precision, options)
        self.ctx, self._bf16 = ctx, precision == 'bf16-mixed'

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        raise unsupported(f'fabric.{name}', _HOW.get(name, ''))

    device = property(lambda self: self.ctx.device)
    is_global_zero = property(lambda self: self.ctx.is_main)
    global_rank = property(lambda self: self.ctx.rank)
    local_rank = property(lambda self: self.ctx.local_rank)
    world_size = property(lambda self: self.ctx.world_size)

    @staticmethod
    def seed_everything(seed: int | None = None, **options: Any) -> int:
        """As Lightning's; in the loop each micro-batch has its own seed."""
        from lightning.fabric import seed_everything

        return int(seed_everything(seed, **options))

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Call a function with this object; the ranks are there already."""
        return None if function is None else function(self, *args, **kwargs)

    def setup(self, *things: Any, clip_grad_norm: float | None = None) -> Any:
        """As ``ctx.prepare``: a model, its optimizers and schedulers."""
        return self.ctx.prepare(*things, clip_grad_norm=clip_grad_norm)

    def loop(self, dataloader: Any, accumulate: int = 1) -> Any:
        """As ``ctx.loop``, with the dataset and the settings of a DataLoader."""
        return LoaderData.of(dataloader, 'the training').in_loop(self.ctx, accumulate=accumulate)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def autocast(self) -> AbstractContextManager[Any]:
        """For the forward pass."""
        return torch.autocast(self.ctx.device.type, torch.bfloat16, enabled=self._bf16)

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """As ``ctx.report``; it counts samples itself."""
        self.log_dict({name: value})

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """As ``ctx.report``; it counts samples itself."""
        self.ctx.report(**{name: torch.as_tensor(value).item() for name, value in metrics.items()})

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*args, **kwargs)

    def to_device(self, thing: Any) -> Any:
        return thing.to(self.ctx.device)
