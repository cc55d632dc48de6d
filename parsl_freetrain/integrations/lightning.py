"""LightningModules in fragments."""

import math
from collections.abc import Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput, needs
from parsl_freetrain.integrations import lightning_arguments as arguments
from parsl_freetrain.integrations.extra import Memory, StepCount
from parsl_freetrain.integrations.lightning_arguments import unsupported
from parsl_freetrain.integrations.lightning_log import Log, take_logs
from parsl_freetrain.integrations.lightning_metrics import Metrics
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.steps.replica import is_replica

with needs('parsl_freetrain.integrations.lightning'):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import _configure_optimizers as optimizers_in
    from lightning.pytorch.core.optimizer import (
        _configure_schedulers_automatic_opt as schedulers_in,
    )
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn


class _State:
    fn, stage = TrainerFn.FITTING, RunningStage.TRAINING


class Trainer:
    """Stands for ``lightning.pytorch.Trainer`` in a fragment.

    ``fit`` gives the data to ``ctx.loop``, and module, optimizer and schedulers to ``ctx.prepare``.
    Checkpoints are the app's. The batch size of the data loader is the global batch, over all
    ranks. Validation is done at the end of epochs; the ranks share the batches. What the module
    logs is given to ``ctx.report``. Callbacks are called on all ranks. Raises BadInput if an
    argument asks for what is not supported here; nothing is trained then.

    Parameters
    ----------
    ctx
        The fragment context.
    max_epochs, max_steps
        As in Lightning; if given, they must say the total of the app.
    callbacks
        ``EarlyStopping``, and callbacks of your own that have only events that are called here.
        Their plain attributes are saved.
    gradient_clip_val
        Clip the gradient of the global batch to this norm.
    precision
        '32-true', 'bf16-mixed' or '16-mixed'.
    check_val_every_n_epoch, accumulate_grad_batches
        As in Lightning.
    best
        Name of a logged metric; the checkpoint in which it was best is kept.
    **options
        Other arguments of ``lightning.pytorch.Trainer``.

    Attributes
    ----------
    callback_metrics
        What was logged last, as tensors.
    should_stop
        Set it to end the training early.
    """

    fast_dev_run = sanity_checking = predicting = False
    val_check_interval = 1.0
    logger = progress_bar_callback = None
    # All ranks see the same metrics, so they decide the same.
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all=True: decision)

    def __init__(
        self,
        ctx: FragmentContext,
        *,
        max_epochs: int | None = None,
        max_steps: int = -1,
        callbacks: Any = (),
        gradient_clip_val: float | None = None,
        precision: Any = '32-true',
        check_val_every_n_epoch: int = 1,
        accumulate_grad_batches: int = 1,
        best: str | None = None,
        **options: Any,
    ) -> None:
        arguments.check_options('Trainer', ctx, precision, options)
        self.ctx, self.max_epochs, self.max_steps = ctx, max_epochs, max_steps
        self.callbacks = [*callbacks] if isinstance(callbacks, (list, tuple)) else [callbacks]
        for callback in self.callbacks:
            arguments.check_callback(callback)
        self.check_val_every_n_epoch, self.best = check_val_every_n_epoch, best
        self._accumulate = accumulate_grad_batches
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.datamodule: Any = None
        self.state = _State()
        self.training = self.validating = False
        self.num_training_batches = self.estimated_stepping_batches = 0
        self._clip, scales = gradient_clip_val, precision == '16-mixed'
        self._half = torch.float16 if scales else torch.bfloat16
        self._autocasts = scales or precision == 'bf16-mixed'
        self._scaler = torch.amp.GradScaler(ctx.device.type, enabled=scales)
        self._log = Log(ctx, self.callback_metrics)
        self._module: Any = None
        self._steps = StepCount(1, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        raise unsupported(f'trainer.{name}')

    is_global_zero = property(lambda self: self.ctx.is_main)
    global_rank = property(lambda self: self.ctx.rank)
    local_rank = property(lambda self: self.ctx.local_rank)
    current_epoch = property(lambda self: self.ctx.epoch)
    lightning_module = property(lambda self: self._module)

    @property
    def world_size(self) -> int:
        """In the default mode 1, as for ``torch.distributed``: nothing may depend on it."""
        return 1 if isinstance(self.ctx.spec.mode, Reproducible) else self.ctx.world_size

    @property
    def global_step(self) -> int:
        return self._steps.at(self.ctx.samples)

    @property
    def should_stop(self) -> bool:
        return bool(self.ctx._run.state.finishing)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.ctx.finish_early('a callback has set trainer.should_stop')

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: Any = None,
    ) -> None:
        """Train from the last checkpoint to the total. BadInput for what is not supported here."""
        if ckpt_path is not None:
            raise unsupported('fit(ckpt_path=...)', 'training goes on from its last checkpoint')
        source = self._begin(model, datamodule, train_dataloaders, 'fit')
        ctx, validates = self.ctx, arguments.is_own('validation_step', model, LightningModule)
        data = LoaderData.of(source.train_dataloader, 'the training')
        held_out = _validation_data(val_dataloaders, source)
        self._count_steps(StepCount(*data.in_epoch(self._accumulate)))
        configured, configs = _optimizer_of(model)
        things = [model, configured, *(one.scheduler for one in configs)]
        if (scaler := self._scaler).is_enabled():
            things.append(scaler)
        prepared, optimizer, *stepped = ctx.prepare(*things, clip_grad_norm=self._clip)
        self.optimizers, self.lr_scheduler_configs = [configured], configs
        self.strategy._lightning_optimizers = [configured]  # for self.optimizers()
        self._event('on_fit_start')
        self._event('on_train_start')
        ctx.keep(Memory(self.callbacks, model), 'lightning')
        ctx.before_step(partial(self._event, 'on_before_optimizer_step', configured))
        at_end = partial(self._end_epoch, held_out if validates else None, configs)
        self._at_end, means = at_end, arguments.wants_means(model, LightningModule)
        ctx.each_epoch(self._end_with_means if means else at_end)
        model.train()
        self.training, own_step = True, arguments.is_own('optimizer_step', model, LightningModule)
        if own_step and scaler.is_enabled():
            raise unsupported("optimizer_step of the module with precision='16-mixed'")
        for batch in data.in_loop(ctx, accumulate=self._accumulate):
            step, number = self.global_step, self.global_step % self.num_training_batches
            optimizer.zero_grad()
            self._metrics.begin()
            with self._autocast(), self._log.training(means):
                loss = _run(model, prepared, batch, number)
            scaler.scale(loss).backward()
            self._metrics.end_of_step()
            if own_step:
                closure = partial(torch.Tensor.detach, loss)
                model.optimizer_step(self.current_epoch, number, optimizer, closure)
            else:
                scaler.step(optimizer)
            scaler.update()
            for one, scheduler in zip(configs, stepped, strict=False):
                if one.interval == 'step' and (step + 1) % one.frequency == 0:
                    scheduler.step()
            ctx.report(loss=loss.item(), learning_rate=optimizer.param_groups[0]['lr'])
        self.training = False
        self._event('on_train_end')
        self._event('on_fit_end')
        self._event('teardown', stage='fit')

    def _end_with_means(self) -> None:
        self._log.means = self.ctx.epoch_means  # to be named only where they are wanted
        self._at_end()

    def _end_epoch(self, held_out: LoaderData | None, configs: Sequence[Any]) -> None:
        epoch = self.ctx.epoch + 1
        # First, since it may be stopped, and is then repeated by the next fragment.
        if held_out is not None and epoch % self.check_val_every_n_epoch == 0:
            self._evaluate('validation', held_out)
        self._log.take(self.ctx.metrics)
        self._log.take_means()
        with self._metrics.unknown():
            self._event('on_train_epoch_end')
        for one in configs:
            if one.interval == 'epoch' and epoch % one.frequency == 0:
                monitored = one.reduce_on_plateau
                one.scheduler.step(*([self._metric(one.monitor)] if monitored else []))
        if self.best is not None:
            self.ctx.checkpoint(best=self._metric(self.best))

    def validate(
        self, model: Any, dataloaders: Any = None, datamodule: Any = None
    ) -> list[dict[str, float]]:
        """Validate a module; all ranks share the batches."""
        source = self._begin(model, datamodule, None, 'validate')
        data = LoaderData.of(dataloaders or source.val_dataloader, 'the validation')
        return [self._evaluate('validation', data)]

    def test(
        self, model: Any, dataloaders: Any = None, datamodule: Any = None
    ) -> list[dict[str, float]]:
        """Test a module; all ranks share the batches."""
        source = self._begin(model, datamodule, None, 'test')
        data = LoaderData.of(dataloaders or source.test_dataloader, 'the test')
        return [self._evaluate('test', data)]

    def _begin(self, model: Any, datamodule: Any, given: Any, stage: str) -> Any:
        if hasattr(given, 'train_dataloader'):
            datamodule, given = given, None
        arguments.check_module(model, datamodule)
        model.trainer, self._module, self.datamodule = self, model, datamodule
        take_logs(arguments.base_of(model, LightningModule))
        self._metrics = Metrics(model, self.ctx._run.peers)
        if datamodule is not None:
            datamodule.trainer = self
        for one in (datamodule, model):
            if one is not None:
                if self.ctx.local_rank == 0:
                    one.prepare_data()
                self.ctx._run.peers.all_reduce_max((0,))()
                one.setup(stage=stage)
        for callback in self.callbacks:
            callback.setup(self, model, stage=stage)
        model.configure_model()
        source = datamodule if datamodule is not None else model
        if given is None:
            return source
        # What was given to ``fit``, and the other data loader of the module.
        return SimpleNamespace(train_dataloader=lambda: given, val_dataloader=source.val_dataloader)

    def _evaluate(self, stage: str, data: LoaderData) -> dict[str, float]:
        data.check_evaluation(f'of the {stage}')
        module, division, done = self._module, self.ctx._run.division, 0
        metrics, self._log.objects = self._metrics, {}
        metrics.begin()
        batches = math.ceil(len(data.dataset) / data.batch_size)

        def measure(_: torch.nn.Module, batch: Any) -> dict[str, Any]:
            nonlocal done
            number = done * division.parts + division.data_rank
            if number >= batches:  # a rank without a batch repeats its first one
                number = division.data_rank % batches
            done += 1
            with self._autocast(), self._log.evaluation(batch) as sums:
                _call(getattr(module, f'{stage}_step'), batch, number)
            metrics.take(number)
            return sums

        self.validating, before = stage == 'validation', self.state.stage
        self.state.stage = (RunningStage.TESTING, RunningStage.VALIDATING)[self.validating]
        self._event(f'on_{stage}_start')
        self._event(f'on_{stage}_epoch_start')
        how = {name: getattr(data, name) for name in ('batch_size', 'collate_fn', 'num_workers')}
        found = self.ctx.evaluate(module, data.dataset, measure, **how)
        metrics.unite()
        found |= {name: float(one.compute()) for name, one in self._log.objects.items()}
        self.ctx.report(**found)
        self._log.take(found)
        self._event(f'on_{stage}_epoch_end')
        self._event(f'on_{stage}_end')
        metrics.reset()
        self.validating, self.state.stage = False, before
        return found

    def _event(self, name: str, *args: Any, **kwargs: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, self._module, *args, **kwargs)
        getattr(self._module, name)(*args, **kwargs)

    def _metric(self, name: str) -> float:
        if name not in self.callback_metrics:
            raise BadInput(
                f'No metric {name!r} was logged; these were: '
                f'{", ".join(map(repr, sorted(self.callback_metrics))) or "none"}.'
            )
        return float(self.callback_metrics[name])

    def _autocast(self) -> Any:
        return torch.autocast(self.ctx.device.type, self._half, enabled=self._autocasts)

    def _count_steps(self, steps: StepCount) -> None:
        self._steps, self.num_training_batches = steps, steps.in_epoch
        total = steps.total_of(self.ctx.spec)
        self.estimated_stepping_batches = steps.at(total)
        said = self.max_steps if self.max_steps >= 0 else steps.in_epoch * (self.max_epochs or 0)
        if self.max_steps >= 0 or self.max_epochs is not None:
            told = f'max_epochs={self.max_epochs}, max_steps={self.max_steps}'
            steps.check(total, said, f'the Trainer was told {said} ({told})')


def _validation_data(given: Any, source: Any) -> LoaderData | None:
    try:
        loader = given or source.val_dataloader()
    except Exception as error:  # of a module without val_dataloader, from either package
        if type(error).__name__ != 'MisconfigurationException':
            raise
        loader = None
    return LoaderData.of(loader, 'the validation') if loader else None


def _optimizer_of(model: Any) -> tuple[Any, Sequence[Any]]:
    """The only optimizer of a module, and the configurations of its schedulers."""
    optimizers, schedulers, monitor = optimizers_in(model.configure_optimizers())
    if len(optimizers) != 1:
        raise unsupported(f'a module with {len(optimizers)} optimizers', 'give them to ctx.prepare')
    configs = schedulers_in(schedulers, monitor)
    if any(one.reduce_on_plateau and one.interval == 'step' for one in configs):
        raise unsupported('ReduceLROnPlateau with interval="step"', 'say interval="epoch"')
    return optimizers[0], configs


def _run(module: Any, prepared: Any, batch: Any, number: int) -> torch.Tensor:
    """The loss of a training step. DistributedDataParallel counts what goes through its forward."""

    def step(*_: Any) -> Any:
        return _call(module.training_step, batch, number)

    if is_replica(prepared):

        def instead(*_: Any) -> Any:
            del module.forward  # the step calls the real one
            return step()

        module.forward = instead
        said = prepared(batch)
    else:
        said = step()
    loss = said.get('loss') if isinstance(said, dict) else said
    if not isinstance(loss, torch.Tensor):
        raise BadInput(
            f'training_step of {type(module).__name__} returned a {type(said).__name__} without a '
            'loss; here every step needs one.'
        )
    return loss


def _call(step: Any, batch: Any, number: int) -> Any:
    """Call a step, which may leave out the number of the batch."""
    try:
        signature(step).bind(batch, number)
    except TypeError:
        return step(batch)
    return step(batch, number)
