"""``@freetrain_app``: from a PyTorch function to trainers that run in holes."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import typeguard
from parsl.app.app import python_app
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader

from parsl_freetrain.core.errors import BadInput, TrainerFailed
from parsl_freetrain.core.words import Checkpoint, Shape
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.future import Progress, TrainingFuture
from parsl_freetrain.executor.member import fragment_task
from parsl_freetrain.executor.payload import pack
from parsl_freetrain.executor.settings import check_trainer
from parsl_freetrain.executor.trainer_settings import Settings, check_name
from parsl_freetrain.executor.trainers import TrainerRecord
from parsl_freetrain.training.fragment import REPRODUCIBLE, SCALED
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled
from parsl_freetrain.training.store import PosixCheckpointStore, claim

__all__ = ['Checkpoint', 'FreeTrainApp', 'Progress', 'Retention', 'Scaled', 'Shape', 'TrainingFuture', 'freetrain_app']

logger = logging.getLogger(__name__)


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
        name = executor.names.take(called, explicit=trainer_name is not None)
        try:
            pack(self.function, self._without_futures(args), {k: None if isinstance(v, Future) else v for k, v in kwargs.items()}, name)
            check_trainer(self.settings.trainer(name), executor.metric, 0, time.time())
            folder = Path(executor.checkpoint_dir).absolute() / name
            checkpoint = claim(folder, name, self.identity(), self.settings.resume or executor.resume)
        except BaseException:
            executor.names.free(name)
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
        """Everything that the trainer waited for is there. What goes wrong is told by its future: nobody else may hear it."""
        if future.done():
            return
        try:
            self._start(future, executor, dfk, folder, checkpoint, args, kwargs)
        except Exception as error:
            executor.names.free(future.name)
            future.state = 'failed'
            future.set_exception(error)

    def _start(self, future: TrainingFuture, executor: FreeTrainExecutor, dfk: DataFlowKernel, folder: Path,
               checkpoint: Checkpoint | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            args = tuple(_value(a) for a in args)
            kwargs = {k: _value(v) for k, v in kwargs.items()}
        except BaseException as error:
            raise TrainerFailed(f'Trainer {future.name!r} cannot start because one of its arguments failed: '
                                f'{type(error).__name__}: {error}.') from error
        if dfk.monitoring is not None:
            executor.mirror.start(dfk.monitoring.logging_endpoint, executor.ledger_path, dfk.run_id)
        settings = self.settings
        fragment = python_app(fragment_task, data_flow_kernel=dfk, executors=[executor.label], cache=False)
        payload = pack(self.function, args, kwargs, future.name)

        def launch(specification: Mapping[str, Any], previous: Future[Checkpoint] | Checkpoint) -> Future[Checkpoint]:
            task: Future[Checkpoint] = fragment(payload, previous, parsl_resource_specification=dict(specification))
            return task

        executor.submit_trainer(TrainerRecord(
            trainer=settings.trainer(future.name), terms=settings.terms(str(folder)), launch=launch, future=future,
            checkpoint=checkpoint or Checkpoint(future.name, '', 0, 0),
            fragments_before=PosixCheckpointStore(folder, future.name).last_fragment()))


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
                  min_nodes: Optional[int] = None,
                  max_nodes: Optional[int] = None,
                  sizes: Optional[Sequence[int]] = None,
                  shapes: Optional[dict[int, Shape]] = None,
                  total_samples: Optional[int] = None,
                  total_epochs: Optional[float] = None,
                  scaling: Optional[dict[int, float]] = None,
                  rescale_up_s: float | None = None,
                  rescale_down_s: float | None = None,
                  priority: float = 1.0,
                  finish_by: Optional[datetime | float] = None,
                  efficiency: Optional[dict[int, float]] = None,
                  user: str = '',
                  group: str = '',
                  mode: str = 'reproducible',
                  shards: Optional[int] = None,
                  seed: int = 0,
                  checkpoint_every_s: float = 30.0,
                  keep_checkpoints: int | Retention = 3,
                  ranks_per_node: int = 1,
                  threads_per_rank: int = 1,
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
        A fragment runs on at least and at most so many nodes. Default: the smallest and the largest of ``sizes`` or ``shapes``; else 1.
    sizes
        The only node counts that fragments may have, such as ``(2, 4, 8)``. Default: all from ``min_nodes`` to ``max_nodes``.
    shapes
        By node count, how the ranks share the work: ``{2: Shape(data=2), 4: Shape(data=2, spatial=(2, 1, 1))}``, where data, spatial and
        pipeline parts multiply to the ranks of so many nodes. The function finds its own in ``ctx.shape`` and ``ctx.mesh``. It takes the
        place of ``sizes``.
    total_samples, total_epochs
        What is trained in total; give one of them.
    scaling
        Throughput by node count, ``{1: 100.0, 2: 190.0}``, in samples per second or any unit that all trainers of the
        executor share; linear in between. Default: learned while training.
    rescale_up_s, rescale_down_s
        What a change to more or fewer nodes costs, in seconds of the current rate; None: as measured, and 2 before that.
    priority
        How much this trainer counts, relative to 1, where the executor's metric asks for it: ``metric='priority'``.
    finish_by
        When training should be finished, as a datetime or in seconds since the epoch, for ``metric='deadline'``.
    efficiency
        Statistical efficiency by node count, ``{1: 1.0, 8: 0.8}``: what a sample is worth in a batch spread over so many nodes, for
        ``metric='goodput'``; linear in between.
    user, group
        Whose caps hold for it; see ``caps`` of the executor.
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
    threads_per_rank
        torch's threads in each process; on CPU nodes all cores divided by ``ranks_per_node``. ``OMP_NUM_THREADS`` has no say in it, since
        another number of threads may add up in another order: keep it for the whole training.
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
        settings = Settings.of(
            called, min_nodes=min_nodes, max_nodes=max_nodes, sizes=sizes, shapes=shapes, total_samples=total_samples,
            total_epochs=total_epochs, scaling=scaling, rescale_up_s=rescale_up_s, rescale_down_s=rescale_down_s, priority=priority,
            finish_by=finish_by, efficiency=efficiency, user=user, group=group, mode=mode, shards=shards, seed=seed,
            checkpoint_every_s=checkpoint_every_s, keep_checkpoints=keep_checkpoints, ranks_per_node=ranks_per_node,
            threads_per_rank=threads_per_rank, scaled=scaled, on_nan=on_nan, resume=resume)
        settings.check(called)
        return FreeTrainApp(function, settings, called, executor, data_flow_kernel)

    return decorate
