"""Train neural networks with Parsl on the nodes that supercomputers leave idle.

Everything that users need is imported from here. Each name is loaded when it is first asked for, so
that ``import parsl_freetrain`` loads neither Parsl nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsl_freetrain.app import FreeTrainApp, freetrain_app
    from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, TrainerFailed
    from parsl_freetrain.core.model.shape import Shape
    from parsl_freetrain.core.model.types import Checkpoint, Progress
    from parsl_freetrain.executor.executor import FreeTrainExecutor
    from parsl_freetrain.executor.settings import HtexOptions, Policy, Recording, Timeouts
    from parsl_freetrain.executor.trainer.future import TrainingFuture
    from parsl_freetrain.remote.client import FreeTrainClient, RemoteTraining
    from parsl_freetrain.sites.cobalt import CobaltSite
    from parsl_freetrain.sites.local import LocalSite
    from parsl_freetrain.sites.packed_environment import PackedEnvironment
    from parsl_freetrain.sites.pbspro import PbsSite
    from parsl_freetrain.sites.provider import BackfillProvider
    from parsl_freetrain.sites.slurm import SlurmSite
    from parsl_freetrain.training.checkpoint.export import (
        export_weights,
        load_weights,
        same_weights,
    )
    from parsl_freetrain.training.loop.context import FragmentContext
    from parsl_freetrain.training.spec.diloco import DiLoCo, Nesterov
    from parsl_freetrain.training.spec.mode import Reproducible, Scaled, Throughput
    from parsl_freetrain.training.spec.retention import Checkpoints, Retention
    from parsl_freetrain.training.spec.training import Epochs, Owner, Ranks, Samples, Scaling
    from parsl_freetrain.training.spec.transports import Folder, ProxyStoreTransport
    from parsl_freetrain.tuning.optuna import Tuned, tune
    from parsl_freetrain.tuning.space import Uniform

__version__ = '2026.11.21'

_MODULES = {
    'app': ('freetrain_app', 'FreeTrainApp'),
    'core.model.errors': ('BadInput', 'FreeTrainError', 'TrainerFailed'),
    'core.model.shape': ('Shape',),
    'core.model.types': ('Checkpoint', 'Progress'),
    'executor.executor': ('FreeTrainExecutor',),
    'executor.settings': ('HtexOptions', 'Policy', 'Recording', 'Timeouts'),
    'executor.trainer.future': ('TrainingFuture',),
    'remote.client': ('FreeTrainClient', 'RemoteTraining'),
    'sites.cobalt': ('CobaltSite',),
    'sites.local': ('LocalSite',),
    'sites.packed_environment': ('PackedEnvironment',),
    'sites.pbspro': ('PbsSite',),
    'sites.provider': ('BackfillProvider',),
    'sites.slurm': ('SlurmSite',),
    'training.checkpoint.export': ('export_weights', 'load_weights', 'same_weights'),
    'training.loop.context': ('FragmentContext',),
    'training.spec.diloco': ('DiLoCo', 'Nesterov'),
    'training.spec.mode': ('Reproducible', 'Scaled', 'Throughput'),
    'training.spec.retention': ('Checkpoints', 'Retention'),
    'training.spec.training': ('Epochs', 'Owner', 'Ranks', 'Samples', 'Scaling'),
    'training.spec.transports': ('Folder', 'ProxyStoreTransport'),
    'tuning.optuna': ('Tuned', 'tune'),
    'tuning.space': ('Uniform',),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    'BackfillProvider', 'BadInput', 'Checkpoint', 'Checkpoints', 'CobaltSite', 'DiLoCo',
    'Epochs', 'Folder', 'FragmentContext', 'FreeTrainApp', 'FreeTrainClient', 'FreeTrainError',
    'FreeTrainExecutor', 'HtexOptions', 'LocalSite', 'Nesterov', 'Owner', 'PackedEnvironment',
    'PbsSite', 'Policy', 'Progress', 'ProxyStoreTransport', 'Ranks', 'Recording',
    'RemoteTraining', 'Reproducible', 'Retention', 'Samples', 'Scaled', 'Scaling', 'Shape',
    'SlurmSite', 'Throughput', 'Timeouts', 'TrainerFailed', 'TrainingFuture',
    'Tuned', 'Uniform', 'export_weights', 'freetrain_app', 'load_weights', 'same_weights',
    'tune',
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
