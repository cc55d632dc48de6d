"""What a LightningModule, its callbacks and trainer may have; the rest is refused first."""

import difflib
from types import FunctionType
from typing import Any

from parsl_freetrain.core.model.errors import BadInput, needs
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.spec.mode import Scaled

with needs('parsl_freetrain.integrations.lightning'):
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

_CALLED = {
    'configure_model', 'on_before_optimizer_step', 'on_fit_end', 'on_fit_start',
    'on_test_end', 'on_test_epoch_end', 'on_test_epoch_start', 'on_test_start',
    'on_train_end', 'on_train_epoch_end', 'on_train_start',
    'on_validation_end', 'on_validation_epoch_end', 'on_validation_epoch_start',
    'on_validation_start', 'prepare_data', 'setup', 'teardown',
    'train_dataloader', 'val_dataloader', 'test_dataloader',
}  # fmt: skip
_NOT_CALLED = {
    'backward', 'configure_callbacks', 'configure_gradient_clipping', 'lr_scheduler_step',
    'manual_backward', 'optimizer_zero_grad',
}  # fmt: skip
# Arguments of Lightning's trainer that may be there, with their values; None: any.
_OPTIONS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(('accelerator', 'devices', 'strategy'), ('auto',)),
    'deterministic': (None, True), 'gradient_clip_algorithm': (None, 'norm'),
    'logger': (None, False), 'default_root_dir': None, 'enable_checkpointing': None,
    'enable_model_summary': None, 'enable_progress_bar': None, 'inference_mode': None,
    'log_every_n_steps': None, 'num_sanity_val_steps': None,
}  # fmt: skip
_HOW = {
    **dict.fromkeys(
        ('accelerator', 'devices', 'num_nodes'),
        'the app and its site choose nodes and devices: leave it out',
    ),
    'strategy': "the app's mode says how the ranks train together: leave it out",
    'logger': 'what is logged is in the ledger and in freetrain report',
    'ModelCheckpoint': "the app writes checkpoints; Trainer(best='val_loss') keeps the best",
    'LearningRateMonitor': 'the learning rate is reported by itself',
    'Timer': 'the app says how much is trained, and its site for how long',
    **dict.fromkeys(
        ('EMAWeightAveraging', 'StochasticWeightAveraging', 'WeightAveraging'),
        'write the loop with ctx.loop, and use ctx.ema or an AveragedModel of torch',
    ),
    **dict.fromkeys(
        ('BatchSizeFinder', 'LearningRateFinder'), 'find it before, outside of fragments'
    ),
    **dict.fromkeys(
        ('ProgressBar', 'RichProgressBar', 'TQDMProgressBar'), 'freetrain watch shows progress'
    ),
}


def unsupported(what: str, how: str = '') -> BadInput:
    return Unsupported(
        f'{what} is not supported by parsl_freetrain.integrations.lightning'
        f'{f": {how}" if how else ""}.'
    )


class Unsupported(BadInput, AttributeError):
    """Something is not supported; also as an attribute that is not there."""


def base_of(thing: Any, kind: type[Any]) -> type[Any]:
    """The class of Lightning that a thing is of, from ``lightning`` or ``pytorch_lightning``."""
    for base in type(thing).__mro__:
        package = base.__module__.split('.')[0]
        if base.__name__ == kind.__name__ and package in ('lightning', 'pytorch_lightning'):
            return base
    raise BadInput(f'Trainer was given a {type(thing).__name__}, not a {kind.__name__}.')


def is_own(name: str, thing: Any, kind: type[Any]) -> bool:
    """Whether a thing or its class has its own method in place of that of Lightning's ``kind``."""
    base = base_of(thing, kind)
    own = name in vars(thing)  # as LambdaCallback's
    return own or getattr(type(thing), name, None) is not getattr(base, name, None)


def wants_means(module: Any, kind: type[Any]) -> bool:
    """Whether a method of its own logs something with ``on_epoch``."""
    own = type(module).__mro__[: type(module).__mro__.index(base_of(module, kind))]
    functions = (one for each in own for one in vars(each).values())
    codes = [one.__code__ for one in functions if isinstance(one, FunctionType)]
    constants = (one for code in codes for one in code.co_consts if isinstance(one, tuple))
    return any('on_epoch' in one for one in constants)


def check_options(kind: str, ctx: Any, precision: Any, options: dict[str, Any]) -> None:
    """Of ``Trainer`` or ``Fabric``. Raises BadInput if one is not supported."""
    if not isinstance(ctx, FragmentContext):
        raise BadInput(
            f'The first argument of {kind} is a {type(ctx).__name__}; it must be the fragment '
            'context.'
        )
    known = '32-true', 'bf16-mixed', *(['16-mixed'] if kind == 'Trainer' else [])
    if precision not in (None, 32, '32', *known):
        how = f'say {" or ".join(map(repr, known))}'
        raise unsupported(f'{kind}(precision={precision!r})', how)
    for name, value in options.items():
        allowed = _OPTIONS.get(name, ())
        if allowed is not None and value not in allowed:
            raise unsupported(f'{kind}({name}={value!r})', _HOW.get(name, '') or _nearest(name))
    if isinstance(ctx.spec.mode, Scaled):
        raise unsupported('mode=Scaled(...)', 'schedules count steps; use another mode')


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, [*_OPTIONS, *_HOW, 'precision', 'max_epochs'], 1, 0.7)
    return f'say {near[0]}' if near and near[0] != name else ''


def check_module(module: Any, datamodule: Any) -> None:
    """Raises BadInput if it or its data module has what is not called, or depends on the nodes."""
    for thing, kind in ((module, LightningModule), (datamodule, LightningDataModule)):
        if thing is None and kind is LightningDataModule:
            continue
        base_of(thing, kind)
        hooks = {name for base in (CheckpointHooks, DataHooks, ModelHooks) for name in vars(base)}
        for name in sorted((hooks | _NOT_CALLED) - _CALLED):
            called = name.startswith('_') or 'predict' in name or not hasattr(kind, name)
            if called or not is_own(name, thing, kind):
                continue
            if not getattr(thing, name).__module__.startswith('pytorch_forecasting.'):  # harmless
                raise unsupported(f'{type(thing).__name__}.{name}')
    if not module.automatic_optimization:
        raise unsupported(
            f'manual optimization in {type(module).__name__}',
            'write the loop with ctx.loop, which takes several optimizers',
        )


def check_callback(callback: Any) -> None:
    """Raises BadInput if a callback waits for an event that does not come."""
    kind = type(callback).__name__
    base_of(callback, Callback)
    if kind in _HOW:
        raise unsupported(f'the callback {kind}', _HOW[kind])
    for name in vars(Callback):
        called = name in _CALLED or name.startswith('_') or 'predict' in name
        own = name in ('state_dict', 'load_state_dict') and kind == EarlyStopping.__name__
        if not (called or own or name == 'state_key') and is_own(name, callback, Callback):
            events = ', '.join(sorted(event for event in _CALLED if event.startswith('on_')))
            raise unsupported(
                f'{name} of the callback {kind}',
                f'its plain attributes are saved, and these are called: {events}',
            )
