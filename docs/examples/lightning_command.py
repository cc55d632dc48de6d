"""Runs a script or command that makes its Lightning Trainer itself, unchanged, in fragments."""

import math
import os
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path

import lightning.pytorch
import torch
from lightning.pytorch.utilities import rank_zero_only

from parsl_freetrain import BadInput
from parsl_freetrain.integrations.lightning import Trainer
from parsl_freetrain.integrations.scripts import run_file

SAVES = {
    'save_top_k': 1, '_every_n_train_steps': 0, '_every_n_epochs': 1, '_train_time_interval': None
}  # fmt: skip


def run_script(ctx, script, *arguments, **options):
    """Run a file, or a command that a package has put beside Python ('nequip-train'): whoever makes
    a Trainer in it gets that of fragments. ``options`` take the place of the script's.
    """

    def make(kind, **given):
        if kind not in made:
            raise BadInput(f'{kind.__name__} is a subclass of Trainer: let the script use Trainer.')
        return ScriptTrainer(ctx, **{**given, **options})

    made = {}
    for package in ('lightning.pytorch', 'pytorch_lightning'):
        with suppress(ImportError):
            made[import_module(package).Trainer] = make
    run_file(script, arguments, made)


class ScriptTrainer(Trainer):
    """It also has loggers, and a file of the best weights for each ``ModelCheckpoint``."""

    def __init__(self, ctx, *, callbacks=(), logger=None, default_root_dir=None, **options):
        rank_zero_only.rank = ctx.rank
        defaults = signature(lightning.pytorch.Trainer.__init__).parameters
        given = {k: v for k, v in options.items() if v != getattr(defaults.get(k), 'default', k)}
        if given.get('deterministic') is False:
            del given['deterministic']
        whole = {f'limit_{what}_batches' for what in ('train', 'val', 'test', 'predict')}
        for name in {*whole, 'val_check_interval'} & given.keys():
            if isinstance(given[name], float) and given[name] == 1.0:
                del given[name]
        if not given.get('gradient_clip_val'):
            given.pop('gradient_clip_val', None)
        self.loggers = several(logger)
        self.default_root_dir = self.log_dir = str(default_root_dir or os.getcwd())
        every = several(callbacks)
        files = [BestWeights(c, self.default_root_dir) for c in every if is_a('ModelCheckpoint', c)]
        self.checkpoint_callback = files[0] if files else None
        # What a LearningRateMonitor does is done.
        others = [c for c in every if not is_a('ModelCheckpoint', c)]
        others = [c for c in others if not is_a('LearningRateMonitor', c)]
        for callback in [c for c in others if type(c).__name__ == 'SaveConfigCallback']:
            others.remove(callback)
            path = Path(self.log_dir, callback.config_filename)
            if ctx.is_main and not path.exists():  # of LightningCLI
                callback.parser.save(callback.config, path, skip_none=False)
        super().__init__(ctx, callbacks=[*others, *files, Logged()], **given)

    logger = property(lambda self: next(iter(self.loggers), None))

    def fit(self, model, *data, ckpt_path=None, weights_only=None, **named):
        # A file that an earlier fragment has left is older than its checkpoint.
        super().fit(model, *data, ckpt_path=None if self.ctx.samples else ckpt_path, **named)

    def validate(self, model, *data, ckpt_path=None, weights_only=None, **named):
        return self.with_weights(super().validate, model, ckpt_path, *data, **named)

    def test(self, model, *data, ckpt_path=None, weights_only=None, **named):
        return self.with_weights(super().test, model, ckpt_path, *data, **named)

    def with_weights(self, evaluate, model, path, *data, **named):
        if path is None:
            return evaluate(model, *data, **named)
        self.ctx._run.peers.all_reduce_max((0,))()  # rank 0 has written it
        path = self.checkpoint_callback.best_model_path if path == 'best' else path
        before = {name: one.clone() for name, one in model.named_parameters()}
        buffers = {name: one.clone() for name, one in model.named_buffers()}
        model.load_state_dict(
            torch.load(path, map_location='cpu', weights_only=False)['state_dict']
        )
        try:
            return evaluate(model, *data, **named)
        finally:
            with torch.no_grad():
                for name, one in (*model.named_parameters(), *model.named_buffers()):
                    one.copy_({**before, **buffers}[name])


class BestWeights(lightning.pytorch.Callback):
    """A file of Lightning of the weights that were best; its plain attributes are kept."""

    def __init__(self, theirs, root):
        for name, value in SAVES.items():
            if getattr(theirs, name) != value:
                raise BadInput(
                    f'ModelCheckpoint has {name}={getattr(theirs, name)!r}, not {value}.'
                )
        theirs.dirpath = theirs.dirpath or os.path.realpath(Path(root, 'checkpoints'))
        self.theirs, self.best_model_path, self.best_model_score = theirs, '', None
        self.written, self.validates = [], False

    def on_validation_end(self, trainer, module):
        if trainer.validating and trainer.training:
            self.validates = True
            self.take(trainer, module)

    def on_train_epoch_end(self, trainer, module):
        if not self.validates:
            self.take(trainer, module)

    def take(self, trainer, module):
        monitor, sign = self.theirs.monitor, 1 if self.theirs.mode == 'min' else -1
        score = float(trainer.callback_metrics[monitor]) if monitor else 0.0
        score = sign * math.inf if math.isnan(score) else score
        best = self.best_model_score
        if monitor and best is not None and sign * score >= sign * best:
            return
        place = {'epoch': trainer.current_epoch, 'step': trainer.global_step}
        numbered = {name: torch.tensor(number) for name, number in place.items()}
        path = self.theirs.format_checkpoint_name({**trainer.callback_metrics, **numbered})
        self.best_model_path, self.best_model_score = path, score
        self.written = [*(one for one in self.written if one != path), path]
        if trainer.is_global_zero:
            write(Path(path), module, place)

    def on_fit_end(self, trainer, module):
        for path in self.written if trainer.is_global_zero else ():
            if path != self.best_model_path:
                Path(path).unlink(missing_ok=True)


class Logged(lightning.pytorch.Callback):
    """Gives loggers what was logged last, at the end of each epoch."""

    def on_train_epoch_end(self, trainer, module):
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(logged, trainer.global_step)
            logger.save()


def write(path, module, place):
    path.parent.mkdir(parents=True, exist_ok=True)
    version = {'pytorch-lightning_version': lightning.pytorch.__version__}
    content = {**place, **version, 'state_dict': module.state_dict()}
    if module.hparams_initial:
        content[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(module.hparams_initial)
        content[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
    draft = path.with_name(f'{path.name}.part')
    torch.save(content, draft)
    draft.replace(path)


def several(given):
    every = [given] if not hasattr(given, '__iter__') else given
    return [one for one in every if one is not None and not isinstance(one, bool)]


def is_a(name, thing):
    return any(base.__name__ == name for base in type(thing).__mro__)
