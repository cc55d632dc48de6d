"""Hugging Face's Trainer in fragments."""

import io
import json
import math
from abc import ABCMeta
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput, needs
from parsl_freetrain.integrations import transformers_arguments as arguments
from parsl_freetrain.integrations.extra import Memory, StepCount
from parsl_freetrain.integrations.scripts import run_file, take_launches
from parsl_freetrain.integrations.transformers_arguments import unsupported
from parsl_freetrain.training.comm.peers import gather_bytes
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.loop.context import FragmentContext

with needs('parsl_freetrain.integrations.transformers'):
    import transformers
    from accelerate.commands import launch
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers.trainer_pt_utils import EvalLoopContainer, find_batch_size
    from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, TrainOutput

_OWN = ('DefaultFlowCallback', 'ProgressCallback', 'PrinterCallback', 'NotebookProgressCallback')
_REMEMBERED = ('best_metric', 'best_global_step', 'log_history')
_Any: Any = object


class _BehindOverrides(_Any):
    """What a subclass may override and call by ``super()``."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = 'eval',
    ) -> EvalLoopOutput:
        """As of ``transformers.Trainer``; the ranks share the batches."""
        args, ctx, size = self.args, self.ctx, len(dataloader.dataset)
        read = LoaderData.read(dataloader, of := f'of {type(self).__name__} for evaluations')
        read.check_evaluation(of)
        given = prediction_loss_only
        loss_only = args.prediction_loss_only if given is None else given
        found: list[tuple[Any, Any]] = []

        def measure(model: torch.nn.Module, inputs: Any) -> dict[str, Any]:
            found_here = self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
            loss, logits, labels = found_here
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            found.append((_on_cpu(logits), _on_cpu(labels)))
            number = find_batch_size(inputs)
            return {} if loss is None else {'loss': (loss.mean().item() * number, number)}

        self._set_average('eval')
        means: dict[str, Any] = {}
        if size:
            means = ctx.evaluate(
                self.model,
                read.dataset,
                measure,
                batch_size=read.batch_size,
                collate_fn=read.collate_fn,
                num_workers=read.num_workers,
            )
        if self.is_in_train:
            self._set_average('train')
        predictions, labels = self._of_all_ranks(found, math.ceil(size / read.batch_size))
        metrics = dict(means)
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            both = EvalPrediction(predictions=predictions, label_ids=labels)
            metrics |= self.compute_metrics(both)
        prefix = f'{metric_key_prefix}_'
        named = {
            f'{prefix}{k.removeprefix(prefix)}': v.item() if hasattr(v, 'item') else v
            for k, v in metrics.items()
        }
        return EvalLoopOutput(predictions, labels, named, size)


class _Order(ABCMeta):
    def mro(cls) -> list[type]:
        """With what may be overridden right before ``transformers.Trainer``."""
        found = super().mro()
        if transformers.Trainer in found and _BehindOverrides not in found:
            found.insert(found.index(transformers.Trainer), _BehindOverrides)
        return found


class InFragments(_Any, metaclass=_Order):
    """Makes a subclass of ``transformers.Trainer`` train in fragments: put it before that class, as
    in ``class MyTrainer(InFragments, Seq2SeqTrainer)``.

    ``train()`` gives the data to ``ctx.loop``, and model, optimizer and scheduler to
    ``ctx.prepare``; ``max_grad_norm`` clips the gradient of the global batch. Checkpoints are the
    app's. ``per_device_train_batch_size`` is over all ranks. What is logged is given to
    ``ctx.report``, at the end of each epoch; so are the figures of evaluations, in which all ranks
    share the work. Callbacks are called on all ranks. Their plain attributes are saved. Raises
    BadInput if an argument asks for what is not supported here; nothing is trained then.

    Parameters
    ----------
    ctx
        The fragment context.
    *args, **kwargs
        As of ``transformers.Trainer``.
    """

    control: Any
    lr_scheduler: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(self, ctx: FragmentContext, *args: Any, **kwargs: Any) -> None:
        self.ctx = ctx
        if not isinstance(ctx, FragmentContext):
            raise BadInput(
                f'The first argument of {type(self).__name__} is a {type(ctx).__name__}; it must '
                'be the fragment context.'
            )
        super().__init__(*args, **kwargs)
        arguments.check_overrides(type(self), InFragments)
        arguments.check_arguments(self.args, ctx)
        self.args._n_gpu = 1  # one process per rank
        for callback in [*self.callback_handler.callbacks]:
            if type(callback).__name__ in _OWN:
                self.remove_callback(callback)
        arguments.check_callbacks(self.callback_handler.callbacks)

    def is_world_process_zero(self) -> bool:
        return self.ctx.is_main

    def is_local_process_zero(self) -> bool:
        return self.ctx.local_rank == 0

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any
    ) -> TrainOutput:
        """Train from the last checkpoint to the total. Raises BadInput if the arguments or the
        dataset do not fit the app.
        """
        given = {**kwargs, 'resume_from_checkpoint': resume_from_checkpoint, 'trial': trial}
        for name in (name for name, value in given.items() if value):
            raise unsupported(f'train({name}=...)', name)
        ctx, args, unused = self.ctx, self.args, self.args.ddp_find_unused_parameters
        read = LoaderData.read(self.get_train_dataloader(), f'of {type(self).__name__}')
        steps = self._steps_in_all(read)
        self._make_optimizer(steps)
        if args.activation_checkpointing:
            how = dict(args.activation_checkpointing_kwargs or {})
            chosen = {name: how.pop(name) for name in ('every_n_layers', 'offload') if name in how}
            self.model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=how or None, **chosen
            )
        self.model_wrapped, self.optimizer, self.lr_scheduler = ctx.prepare(
            self.model,
            self.optimizer,
            self.lr_scheduler,
            clip_grad_norm=args.max_grad_norm or None,
            find_unused_parameters=not args.gradient_checkpointing if unused is None else unused,
        )
        self._set_average('train')
        self.state.max_steps, self.state.num_train_epochs = steps, math.ceil(args.num_train_epochs)
        self.state.train_batch_size = args.per_device_train_batch_size
        self.current_gradient_accumulation_steps = 1
        self.is_in_train = True
        self._count()
        self._event('on_train_begin')
        callbacks = self.callback_handler.callbacks
        ctx.keep(Memory(callbacks, self.model, self.state, _REMEMBERED), 'transformers')
        ctx.before_step(lambda: self._event('on_pre_optimizer_step'))
        ctx.after_step(self._after_step)
        ctx.each_epoch(self._end_of_epoch)
        for inputs in read.in_loop(ctx, accumulate=args.gradient_accumulation_steps):
            self.optimizer.zero_grad()
            loss = self.training_step(self.model_wrapped, inputs, None)
            self.optimizer.step()
            self.lr_scheduler.step()
            ctx.report(loss=loss.item())
        self._count()
        self._event('on_train_end')
        self.is_in_train = False
        self._set_average('train' if args.eval_strategy == 'no' else 'eval')  # as transformers does
        metrics = {'train_loss': ctx.metrics.get('loss', math.nan), 'epoch': self.state.epoch}
        return TrainOutput(self.state.global_step, metrics['train_loss'], metrics)

    def _make_optimizer(self, steps: int) -> None:
        self.create_optimizer_and_scheduler(num_training_steps=steps)
        kind = type(self.lr_scheduler)
        if issubclass(kind, ReduceLROnPlateau) or not hasattr(self.lr_scheduler, 'get_last_lr'):
            raise unsupported(f'the scheduler {kind.__name__}')
        if self.args.metric_for_best_model is not None and hasattr(self.optimizer, 'eval'):
            raise unsupported(
                f'metric_for_best_model with {self.args.optim}',
                how='it evaluates an average of the weights, which a checkpoint would not hold',
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As of ``transformers.Trainer``, and give the numbers to ``ctx.report``."""
        others = '_runtime', '_per_second', 'epoch'
        found = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
        self.ctx.report(**{k: v for k, v in found.items() if not k.endswith(others)})
        super().log(logs, start_time)

    def end(self) -> None:
        """Nothing: the fragment ends its process group itself."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As of ``transformers.Trainer``, on rank 0."""
        if self.ctx.is_main:
            super().save_model(output_dir, _internal_call)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """bfloat16, if the arguments say so."""
        device, bf16 = self.ctx.device.type, self.args.bf16
        return torch.autocast(device, torch.bfloat16, bf16, cache_enabled)

    def _set_average(self, mode: str) -> None:
        """Of an optimizer that evaluates an average of the weights (schedule-free), and trains
        others.
        """
        if callable(change := getattr(self.optimizer, mode, None)):
            change()

    def _steps_in_all(self, read: LoaderData) -> int:
        args = self.args
        counted = self._steps = StepCount(*read.in_epoch(args.gradient_accumulation_steps))
        in_epochs = math.ceil(args.num_train_epochs * counted.in_epoch)
        wanted: int = args.max_steps if args.max_steps > 0 else in_epochs
        total = counted.total_of(self.ctx.spec)
        told = f'max_steps={args.max_steps}, num_train_epochs={args.num_train_epochs:g}'
        counted.check(total, wanted, f'TrainingArguments says {wanted} ({told})')
        return wanted

    def _count(self) -> None:
        self.state.global_step = self._steps.at(self.ctx.samples)
        self.state.epoch = self.ctx.samples / self._steps.size

    def _event(self, name: str) -> None:
        handler = self.callback_handler
        handler.optimizer, handler.lr_scheduler = self.optimizer, self.lr_scheduler
        self.control = getattr(handler, name)(self.args, self.state, self.control)
        for wish in ('should_save', 'should_evaluate', 'should_epoch_stop'):
            if getattr(self.control, wish):
                raise unsupported(f'a callback that sets {wish}', how="use eval_strategy='epoch'")
        if self.control.should_training_stop:
            self.ctx.finish_early('a callback has set should_training_stop')

    def _after_step(self) -> None:
        self._count()
        self.ctx.report(learning_rate=self.lr_scheduler.get_last_lr()[0])
        self._event('on_step_end')

    def _end_of_epoch(self) -> None:
        self._count()
        self._event('on_epoch_end')
        self.log({'loss': self.ctx.metrics['loss']})
        if self.args.eval_strategy == 'epoch':
            metrics = self.evaluate()
            if self.control.should_training_stop:
                self.ctx.finish_early('a callback has set should_training_stop')
            self._determine_best_metric(metrics, None)
            if (best := self.args.metric_for_best_model) is not None:
                self.ctx.checkpoint(best=metrics[f'eval_{best.removeprefix("eval_")}'])
        # With times that each rank has measured, and numbers of any kind.
        log = json.dumps(self.state.log_history, default=repr)
        self.state.log_history = json.loads(gather_bytes(self.ctx._run.peers, log.encode())[0])

    def _of_all_ranks(self, found: list[tuple[Any, Any]], batches: int) -> tuple[Any, Any]:
        division, packed = self.ctx._run.division, io.BytesIO()
        mine = [(division.data_rank + i * division.parts, *one) for i, one in enumerate(found)]
        torch.save([one for one in mine if one[0] < batches], packed)
        by_batch: dict[int, list[Any]] = {}
        for said in gather_bytes(self.ctx._run.peers, packed.getvalue()):
            for number, *both in torch.load(io.BytesIO(said), weights_only=True):
                by_batch[number] = both
        joined = [
            EvalLoopContainer(self.args.eval_do_concat_batches, padding_index=-100) for _ in (0, 1)
        ]
        for _, both in sorted(by_batch.items()):
            for container, tensors in zip(joined, both, strict=True):
                if tensors is not None:
                    container.add(tensors)
        return joined[0].get_arrays(), joined[1].get_arrays()


class Trainer(InFragments, transformers.Trainer):
    """``transformers.Trainer`` in fragments; see :class:`InFragments`."""


def run_script(ctx: FragmentContext, script: str, *arguments: str) -> None:
    """Run a script or command that trains with ``transformers.Trainer`` or a subclass, unchanged:
    each that is made in it trains in fragments, as by :class:`InFragments`.

    Parameters
    ----------
    ctx
        The fragment context.
    script
        The path of a file, or a command that an installed package has put beside Python ('trl').
        What it gives to ``accelerate launch`` runs in this process.
    *arguments
        Its arguments, as on the command line.

    Raises
    ------
    BadInput
        If there is no such file or command, or it asks for what is not supported in fragments.
    """

    def make(kind: Any, *_: Any, **__: Any) -> Any:
        if issubclass(kind, InFragments):
            return object.__new__(kind)

        def begin(self: Any, *args: Any, **given: Any) -> None:
            InFragments.__init__(self, ctx, *args, **given)

        return object.__new__(type(kind.__name__, (InFragments, kind), {'__init__': begin}))

    take_launches(launch)
    run_file(script, arguments, {transformers.Trainer: make})


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)):
        return tuple(_on_cpu(one) for one in value)
    if isinstance(value, dict):
        return {name: _on_cpu(one) for name, one in value.items()}
    return value
