"""``@freetrain_app``: from a PyTorch function to trainers that run in holes."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import typeguard
from parsl.app.app import python_app
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader

from parsl_freetrain.core.errors import BadInput, TrainerFailed
from parsl_freetrain.core.words import Checkpoint, ScalingCurve, Trainer
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.future import Progress, TrainingFuture
from parsl_freetrain.executor.member import fragment_task
from parsl_freetrain.executor.payload import pack
from parsl_freetrain.executor.trainers import Terms, TrainerRecord
from parsl_freetrain.training.fragment import MODES, REPRODUCIBLE, SCALED
from parsl_freetrain.training.policies import POLICIES
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled
from parsl_freetrain.training.store import RESUME, PosixCheckpointStore, claim

__all__ = ['Checkpoint', 'FreeTrainApp', 'Progress', 'Retention', 'Scaled', 'TrainingFuture', 'freetrain_app']

logger = logging.getLogger(__name__)

NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`freetrain_app`."""

    min_nodes: int
    max_nodes: int
    total_samples: int | None
    total_epochs: float | None
    curve: ScalingCurve | None
    rescale_up_s: float
    rescale_down_s: float
    priority: float
    mode: str
    shards: int
    seed: int
    checkpoint_every_s: float
    keep_checkpoints: int | Retention
    ranks_per_node: int
    scaled: Scaled | None
    on_nan: str
    resume: str | None

    def trainer(self, name: str) -> Trainer:
        return Trainer(name, self.min_nodes, self.max_nodes, self.total_samples, self.curve, self.rescale_up_s, self.rescale_down_s,
                       self.priority)

    def terms(self, store: str) -> Terms:
        """How the fragments of a trainer with checkpoint folder ``store`` train."""
        keep = Retention(self.keep_checkpoints) if isinstance(self.keep_checkpoints, int) else self.keep_checkpoints
        return Terms(store, self.total_samples, self.total_epochs, self.mode, self.shards, self.seed, self.checkpoint_every_s, keep,
                     self.ranks_per_node, self.scaled or Scaled(), self.on_nan)

    def check(self, name: str) -> None:
        """Refuse what can never be trained.

        Raises
        ------
        BadInput
            With a sentence that says what would be right.
        """
        where = f'@freetrain_app on {name!r}'
        self.trainer(name)
        check_name(name)
        totals = [t for t in (self.total_samples, self.total_epochs) if t is not None]
        if len(totals) != 1:
            raise BadInput(f'{where}: {len(totals)} of total_samples and total_epochs are given; say by one of them what is trained.')
        if not math.isfinite(totals[0]) or totals[0] <= 0:
            raise BadInput(f'{where}: the total to train is {totals[0]}; it must be more than 0.')
        if self.mode not in MODES:
            raise BadInput(f'{where}: there is no mode {self.mode!r}; choose one of {", ".join(MODES)}.')
        keep = self.keep_checkpoints if isinstance(self.keep_checkpoints, int) else self.keep_checkpoints.last
        if self.scaled is not None and self.mode != SCALED:
            raise BadInput(f"{where}: scaled is given, but mode is {self.mode!r}; say mode='scaled', or leave scaled out.")
        if self.on_nan not in POLICIES:
            raise BadInput(f'{where}: on_nan is {self.on_nan!r}; it must be one of {", ".join(map(repr, POLICIES))}.')
        for what, value, least in (('ranks_per_node', self.ranks_per_node, 1), ('shards', self.shards, 1), ('keep_checkpoints', keep, 1)):
            if value < least:
                raise BadInput(f'{where}: {what} is {value}; it must be at least {least}.')
        if self.mode == REPRODUCIBLE and self.shards < self.max_nodes * self.ranks_per_node:
            raise BadInput(f'{where}: {self.max_nodes} nodes with {self.ranks_per_node} ranks each cannot share {self.shards} virtual '
                           f'shards; shards must be at least {self.max_nodes * self.ranks_per_node}.')
        if self.resume is not None and self.resume not in RESUME:
            raise BadInput(f'{where}: resume is {self.resume!r}; it must be one of {", ".join(map(repr, RESUME))}.')
        if not math.isfinite(self.checkpoint_every_s) or self.checkpoint_every_s <= 0:
            raise BadInput(f'{where}: checkpoint_every_s is {self.checkpoint_every_s}; it must be a positive number of seconds.')


class FreeTrainApp:
    """What :func:`freetrain_app` makes of a function; call it to start a trainer."""

    def __init__(self, function: Callable[..., Any], settings: Settings, name: str, executor: str | None,
                 data_flow_kernel: DataFlowKernel | None) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.settings = settings
        self.name = name
        self.executor = executor
        self.data_flow_kernel = data_flow_kernel

    def __call__(self, *args: Any, trainer_name: str | None = None, **kwargs: Any) -> TrainingFuture:
        """Start a trainer.

        Parameters
        ----------
        *args, **kwargs
            What the function takes behind its fragment context; futures among them are waited for.
        trainer_name
            Name of the trainer and of its checkpoint folder. Default: the function's name, with a
            number from the second call on; name trainers yourself if their order of calling may change between runs.

        Raises
        ------
        BadInput
            If the trainer can never run, before anything is submitted.
        """
        inspect.signature(self.function).bind(None, *args, **kwargs)
        dfk = self.data_flow_kernel or DataFlowKernelLoader.dfk()
        executor = self._executor(dfk)
        called = self.name if trainer_name is None else trainer_name
        check_name(called)
        name = executor.name_trainer(called, explicit=trainer_name is not None)
        try:
            pack(self.function, self._without_futures(args), {k: None if isinstance(v, Future) else v for k, v in kwargs.items()}, name)
            folder = Path(executor.checkpoint_dir).absolute() / name
            checkpoint = claim(folder, name, self.identity(), self.settings.resume or executor.resume)
        except BaseException:
            executor.free_name(name)
            raise
        future = TrainingFuture(name)
        _when_done([a for a in (*args, *kwargs.values()) if isinstance(a, Future)],
                   lambda: self._submit(future, executor, dfk, folder, checkpoint, args, kwargs))
        return future

    def _executor(self, dfk: DataFlowKernel) -> FreeTrainExecutor:
        ours = {label: e for label, e in dfk.executors.items() if isinstance(e, FreeTrainExecutor)}
        if self.executor is None and ours:
            return next(iter(ours.values()))
        if self.executor in ours:
            return ours[self.executor]
        known = ', '.join(map(repr, ours)) or 'none'
        raise BadInput(f'Trainer {self.name!r} needs a FreeTrainExecutor{f" labelled {self.executor!r}" if self.executor else ""} '
                       f'in the Parsl configuration; it has {known}.')

    def identity(self) -> dict[str, Any]:
        """What makes the checkpoints of one trainer unusable for another."""
        settings = self.settings
        scaled = asdict(settings.scaled or Scaled()) if settings.mode == SCALED else None
        return {'function': f'{self.function.__module__}.{self.function.__qualname__}', 'mode': settings.mode, 'seed': settings.seed,
                'shards': settings.shards if settings.mode == REPRODUCIBLE else None, 'scaled': scaled}

    @staticmethod
    def _without_futures(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if isinstance(a, Future) else a for a in args)

    def _submit(self, future: TrainingFuture, executor: FreeTrainExecutor, dfk: DataFlowKernel, folder: Path,
                checkpoint: Checkpoint | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Everything that the trainer waited for is there."""
        if future.done():
            return
        try:
            args = tuple(_value(a) for a in args)
            kwargs = {k: _value(v) for k, v in kwargs.items()}
        except BaseException as error:
            failure = TrainerFailed(
                f'Trainer {future.name!r} cannot start because one of its arguments failed: {type(error).__name__}: {error}.')
            failure.__cause__ = error
            future.state = 'failed'
            future.set_exception(failure)
            return
        if dfk.monitoring is not None:
            executor.mirror.start(dfk.monitoring.logging_endpoint, executor.ledger_path, dfk.run_id)
        settings = self.settings
        fragment = python_app(fragment_task, data_flow_kernel=dfk, executors=[executor.label], cache=False)
        payload = pack(self.function, args, kwargs, future.name)

        def launch(specification: Mapping[str, Any], previous: Future[Checkpoint] | Checkpoint) -> Future[Checkpoint]:
            task: Future[Checkpoint] = fragment(payload, previous, parsl_resource_specification=dict(specification))
            return task

        try:
            executor.submit_trainer(TrainerRecord(
                trainer=settings.trainer(future.name),
                terms=settings.terms(str(folder)),
                launch=launch, future=future, checkpoint=checkpoint or Checkpoint(future.name, '', 0, 0),
                fragments_before=PosixCheckpointStore(folder, future.name).last_fragment()))
        except BadInput as error:
            future.state = 'failed'
            future.set_exception(error)


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise BadInput(f'{name!r} cannot name a trainer: it names a folder too, so use letters, digits, dots, dashes and underscores.')


def _takes_a_context(function: Callable[..., Any]) -> bool:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.VAR_POSITIONAL)


def _value(argument: Any) -> Any:
    return argument.result() if isinstance(argument, Future) else argument


def _when_done(futures: list[Future[Any]], then: Callable[[], None]) -> None:
    """Call ``then`` once, when all futures are done; at once if there are none."""
    left = len(futures)
    lock = threading.Lock()
    if not left:
        then()

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    for future in futures:
        future.add_done_callback(one_done)


@typeguard.typechecked
def freetrain_app(*,
                  min_nodes: int = 1,
                  max_nodes: int = 1,
                  total_samples: Optional[int] = None,
                  total_epochs: Optional[float] = None,
                  scaling: Optional[dict[int, float]] = None,
                  rescale_up_s: float = 2.0,
                  rescale_down_s: float = 2.0,
                  priority: float = 1.0,
                  mode: str = 'reproducible',
                  shards: Optional[int] = None,
                  seed: int = 0,
                  checkpoint_every_s: float = 30.0,
                  keep_checkpoints: int | Retention = 3,
                  ranks_per_node: int = 1,
                  scaled: Optional[Scaled] = None,
                  on_nan: str = 'stop',
                  resume: Optional[str] = None,
                  name: Optional[str] = None,
                  executor: Optional[str] = None,
                  data_flow_kernel: Optional[DataFlowKernel] = None) -> Callable[[Callable[..., Any]], FreeTrainApp]:
    """Make a trainer of a PyTorch function.

    The function's first parameter is the :class:`~parsl_freetrain.training.context.FragmentContext`. Calling the
    decorated function returns a :class:`~parsl_freetrain.executor.future.TrainingFuture` of the final checkpoint.

    Parameters
    ----------
    min_nodes, max_nodes
        A fragment runs on at least and at most so many nodes.
    total_samples, total_epochs
        What is trained in total; give one of them.
    scaling
        Throughput by node count, ``{1: 100.0, 2: 190.0}``, in samples per second or any unit that all trainers of the
        executor share; linear in between. Default: learned while training.
    rescale_up_s, rescale_down_s
        What a change to more or fewer nodes costs, in seconds of the current rate.
    priority
        How much this trainer counts, relative to 1, where the executor's metric asks for it: ``metric='priority'``.
    mode
        'reproducible': the same weights to the last bit for any sequence of node counts; 'throughput': plain DistributedDataParallel;
        'scaled': the same with a global batch that grows with the nodes.
    shards
        Virtual shards of the global batch in reproducible mode, at least ``max_nodes * ranks_per_node``, which is the default.
    seed
        Of the data order and of the random numbers in the training loop.
    checkpoint_every_s
        Seconds between checkpoints within a fragment: what a node that vanishes can cost.
    keep_checkpoints
        How many of the newest checkpoints are kept; or a :class:`Retention`, which can also keep every nth fragment's and the best.
    ranks_per_node
        Processes per node; on GPU nodes one per GPU.
    scaled
        How the learning rate and the gradients change with the ranks in scaled mode; see :class:`Scaled`.
    on_nan
        What is done when a gradient is infinite or not a number. 'stop': the trainer fails, with the last good checkpoint kept; 'skip':
        the step is left out; 'rollback': training goes back to the last good checkpoint and leaves out that step, at most 3 times.
    resume
        Checkpoints of an earlier run are used if there are any ('auto'), must be there ('require'), or are
        moved aside ('never'). Default: as the executor says.
    name
        Name of the trainers made by calls that give none; default the function's.
    executor
        Label of the FreeTrainExecutor; default the first of the configuration.
    data_flow_kernel
        Default: the one that :func:`parsl.load` made.

    Raises
    ------
    BadInput
        If a setting can never work.
    """

    def decorate(function: Callable[..., Any]) -> FreeTrainApp:
        called = name or function.__name__
        if not _takes_a_context(function):
            raise BadInput(f'@freetrain_app on {called!r}: it takes no positional argument; the first must be the fragment context.')
        settings = Settings(
            min_nodes, max_nodes, total_samples, total_epochs, ScalingCurve.from_points(scaling) if scaling else None,
            rescale_up_s, rescale_down_s, priority, mode, max_nodes * ranks_per_node if shards is None else shards, seed,
            checkpoint_every_s, keep_checkpoints, ranks_per_node, scaled, on_nan, resume)
        settings.check(called)
        return FreeTrainApp(function, settings, called, executor, data_flow_kernel)

    return decorate
