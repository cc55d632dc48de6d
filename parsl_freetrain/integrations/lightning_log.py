"""``self.log`` of a LightningModule in fragments."""

import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.integrations.lightning_arguments import unsupported
from parsl_freetrain.training.loop.changes import is_metric
from parsl_freetrain.training.loop.context import FragmentContext

with needs('parsl_freetrain.integrations.lightning'):
    from lightning.pytorch.utilities.data import extract_batch_size


class Log:
    """``LightningModule.log``: the mean of a global batch, or over an evaluation."""

    def __init__(self, ctx: FragmentContext, metrics: dict[str, torch.Tensor]) -> None:
        self._ctx, self._metrics = ctx, metrics
        self._where = ''
        self._batch: Any = None
        self._sums: dict[str, tuple[float, float]] = {}
        self.objects: dict[str, Any] = {}  # of torchmetrics, in the last evaluation
        self.means: dict[str, float] = {}  # over the last epoch
        self._with_means = False

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = 'mean',
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        if reduce_fx not in ('mean', torch.mean):
            raise unsupported(f'self.log({name!r}, reduce_fx={reduce_fx!r})', 'log the mean')
        of_epoch = self._where == 'training' and on_epoch
        if hasattr(type(value), 'metric_state') and is_metric(value):
            if self._where == 'evaluation':
                self.objects[name] = value
                return
            if of_epoch:
                raise unsupported(
                    f'self.log({name!r}, an object of torchmetrics, on_epoch=True) in training',
                    'it has the values of one batch: log numbers, or the object in an evaluation',
                )
            value = value.compute()  # of this batch only
        one = isinstance(value, torch.Tensor) and value.numel() == 1
        if not one and not isinstance(value, numbers.Number):
            raise unsupported(
                f'self.log({name!r}, a {type(value).__name__})',
                'log a number, or an object of torchmetrics that has one',
            )
        number = float(value.detach() if one else value)
        if of_epoch and not self._with_means:
            raise unsupported(
                f'self.log({name!r}, on_epoch=True), called by no method of the module itself,',
                'call self.log with on_epoch=True in a method of the class of the module',
            )
        if self._where == 'evaluation':
            if on_step:
                raise unsupported(f'self.log({name!r}, on_step=True) in an evaluation')
            size = extract_batch_size(self._batch) if batch_size is None else batch_size
            self._sums[name] = number * size, float(size)
            return
        self._ctx.report(**{name: number}, **({f'{name}_epoch': number} if of_epoch else {}))
        if not self._where:
            self.take({name: number})

    def take(self, found: Mapping[str, float]) -> None:
        self._metrics.update({name: torch.tensor(value) for name, value in found.items()})

    def take_means(self) -> None:
        """Make known what was logged with ``on_epoch=True``, at the end of an epoch."""
        found = {k: v for k, v in self.means.items() if k.removesuffix('_epoch') in self.means}
        found = {k: v for k, v in found.items() if k.endswith('_epoch')}
        self.take({**found, **{k.removesuffix('_epoch'): v for k, v in found.items()}})
        self._ctx.report(**found)

    @contextmanager
    def training(self, with_means: bool) -> Iterator[None]:
        self._where, self._with_means = 'training', with_means
        try:
            yield
        finally:
            self._where = ''

    @contextmanager
    def evaluation(self, batch: Any) -> Iterator[dict[str, tuple[float, float]]]:
        """Around a step; gives the sums of what is logged in it."""
        self._where, self._batch, self._sums = 'evaluation', batch, {}
        try:
            yield self._sums
        finally:
            self._where = ''


def take_logs(base: Any) -> None:
    """Have ``LightningModule.log``, which modules may override and call, go to our trainer."""
    theirs = base.log
    if hasattr(theirs, 'of_fragments'):
        return

    @wraps(theirs)
    def log(module: Any, *args: Any, **kwargs: Any) -> None:
        ours = vars(module._trainer or object).get('_log')
        (ours if isinstance(ours, Log) else partial(theirs, module))(*args, **kwargs)

    log.of_fragments = True  # type: ignore[attr-defined]
    base.log = log
