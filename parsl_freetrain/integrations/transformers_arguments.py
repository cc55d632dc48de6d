"""What a Hugging Face Trainer may be given; the rest is refused before it trains."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from parsl_freetrain.core.model.errors import BadInput, needs
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.spec.mode import Scaled

with needs('parsl_freetrain.integrations.transformers'):
    import transformers

# What a TrainingArguments may say: it is done as transformers does it, or by the app, as the
# documentation says. All other arguments must have their defaults.
_SAVING = {'output_dir', 'save_strategy', 'save_steps', 'save_total_limit', 'save_only_model'}
_SHOWING = {
    'disable_tqdm', 'log_level', 'log_level_replica', 'log_on_each_node', 'logging_dir',
    'logging_first_step', 'logging_steps', 'logging_strategy', 'run_name',
}  # fmt: skip
_TRAINING = {
    'activation_checkpointing', 'activation_checkpointing_kwargs', 'gradient_checkpointing',
    'gradient_checkpointing_kwargs',
    # How data and gradients travel.
    'dataloader_persistent_workers', 'dataloader_prefetch_factor', 'ddp_broadcast_buffers',
    'ddp_bucket_cap_mb', 'ddp_timeout',
    'adam_beta1', 'adam_beta2', 'adam_epsilon', 'bf16', 'dataloader_num_workers',
    'dataloader_pin_memory', 'ddp_find_unused_parameters', 'do_eval', 'do_predict', 'do_train',
    'eval_accumulation_steps', 'eval_do_concat_batches', 'eval_steps', 'eval_strategy',
    'full_determinism', 'gradient_accumulation_steps', 'greater_is_better', 'label_names',
    'label_smoothing_factor',
    'learning_rate', 'lr_scheduler_kwargs', 'lr_scheduler_type', 'max_grad_norm', 'max_steps',
    'metric_for_best_model', 'num_train_epochs', 'optim', 'optim_args',
    'per_device_eval_batch_size', 'per_device_train_batch_size', 'prediction_loss_only',
    'remove_unused_columns', 'seed', 'train_sampling_strategy', 'use_cache', 'use_cpu',
    'warmup_ratio', 'warmup_steps', 'weight_decay',
}  # fmt: skip
# Made here, since making one resets what transformers knows about devices.
_DEFAULTS = vars(transformers.TrainingArguments(use_cpu=True))
_HOW = {
    'resume_from_checkpoint': 'training goes on from its last checkpoint by itself',
    'load_best_model_at_end': 'state metric_for_best_model; the best checkpoint is kept, and '
    'load_weights reads it',
    'report_to': 'what is logged is in the ledger and in freetrain report',
    'deepspeed': 'the app and its context divide the work among the nodes',
    'fsdp': 'ctx.shard divides parameters among the nodes',
    'fp16': 'use bf16, which needs no gradient scaler',
    'data_seed': 'the seed of the order of samples is that of the mode: Reproducible(seed=...)',
    'dataloader_drop_last': 'ctx.loop trains the last batch of an epoch too',
}
_REPLACED = (
    'train', '_inner_training_loop', '_run_epoch', 'get_batch_samples', '_save_checkpoint',
    '_clip_grad_norm', '_maybe_log_save_evaluate',
)  # fmt: skip
_EVENTS = {
    'on_init_end', 'on_train_begin', 'on_train_end', 'on_pre_optimizer_step', 'on_step_end',
    'on_epoch_end', 'on_evaluate', 'on_predict', 'on_log',
}  # fmt: skip


def check_arguments(args: Any, ctx: FragmentContext) -> None:
    """Raises BadInput if they ask for what is not supported or the app does not say."""
    for field in dataclasses.fields(args):
        value, ours = getattr(args, field.name), _SAVING | _SHOWING | _TRAINING
        # What a subclass adds is for its own trainer (TRL's SFTConfig and SFTTrainer).
        if field.name in _DEFAULTS and field.name not in ours and value != _DEFAULTS[field.name]:
            raise unsupported(f'TrainingArguments({field.name}={value!r})', field.name)
    for name, known in (
        ('eval_strategy', ('no', 'epoch')),
        ('train_sampling_strategy', ('random', 'sequential')),
    ):
        if (value := getattr(args, name)) not in known:
            said = getattr(value, 'value', value)
            raise unsupported(
                f'TrainingArguments({name}={said!r})', how=f'say {" or ".join(map(repr, known))}'
            )
    if args.device.type != ctx.device.type:
        raise unsupported(f'training on {args.device} where the node has {ctx.device}')
    if isinstance(ctx.spec.mode, Scaled):
        raise unsupported('mode=Scaled(...)', how='the schedule counts steps; use another mode')
    if (metric := args.metric_for_best_model) is not None:
        mode, kept = 'max' if args.greater_is_better else 'min', ctx.spec.checkpoints.retention.mode
        if mode != kept:
            raise BadInput(
                f'TrainingArguments(metric_for_best_model={metric!r}) looks for the {mode}, and '
                f'the app keeps the {kept}: give it '
                f"checkpoints=Checkpoints(keep=Retention(mode='{mode}'))."
            )


def check_overrides(trainer: type[Any], ours: type[Any]) -> None:
    theirs = trainer.__mro__[: trainer.__mro__.index(transformers.Trainer)]
    for kind in theirs:  # also behind ours, which would hide it
        for name in _REPLACED if kind is not ours else ():
            own = vars(kind).get(name)
            # TRL's writes a model card first.
            harmless = name == '_save_checkpoint' and kind.__module__.startswith('trl.')
            if own is not None and not harmless:
                raise unsupported(
                    f'the method {kind.__name__}.{name}', how='write the loop with ctx.loop'
                )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises BadInput if a callback waits for an event that does not come."""
    for callback in callbacks:
        for name in dir(transformers.TrainerCallback):
            own = getattr(type(callback), name) is not getattr(transformers.TrainerCallback, name)
            if name.startswith('on_') and name not in _EVENTS and own:
                raise BadInput(
                    f'The callback {type(callback).__name__} has {name}, which is not called in '
                    f'fragments; these are: {", ".join(sorted(_EVENTS))}.'
                )


def unsupported(what: str, name: str = '', *, how: str = '') -> BadInput:
    said = how or _HOW.get(name, '')
    return BadInput(
        f'{what} is not supported by parsl_freetrain.integrations.transformers'
        f'{f": {said}" if said else ""}.'
    )
