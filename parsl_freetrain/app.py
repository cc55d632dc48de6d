"""``@freetrain_app``: from a PyTorch function to trainers that run in holes."""

import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Optional

from msgspec import structs
from parsl.app.app import join_app, python_app
from parsl.dataflow.dflow import DataFlowKernel, DataFlowKernelLoader
from parsl.errors import NoDataFlowKernelError

from parsl_freetrain.core.model.checked_settings import checked_arguments, refuse_unknown
from parsl_freetrain.core.model.checked_values import AtLeast1, Positive
from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.fragment.payload import Packed, definition, name_of, pack, unfit
from parsl_freetrain.executor.fragment.trainer_record import TellReplica, TrainerRecord
from parsl_freetrain.executor.fragment.worker_tasks import fragment_task
from parsl_freetrain.executor.run_lock import check_name
from parsl_freetrain.executor.settings import check_trainer
from parsl_freetrain.executor.trainer import arguments
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.host.rehearsals import say_if_never
from parsl_freetrain.training.checkpoint import folder_claim
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.spec import training as ts
from parsl_freetrain.training.spec.diloco import DiLoCo
from parsl_freetrain.training.spec.mode import Reproducible, Scaled, Throughput
from parsl_freetrain.training.spec.retention import Checkpoints, Resume
from parsl_freetrain.training.spec.shapes import identity_of

if TYPE_CHECKING:
    from parsl_freetrain.rehearsal import Rehearsal

# What a call does instead of starting a trainer, in ``freetrain rehearse``.
instead_of_calls: Callable[['FreeTrainApp', Any, Any], TrainingFuture] | None = None


class FreeTrainApp:
    """What :func:`freetrain_app` makes of a function; call it to start a trainer."""

    def __init__(
        self,
        function: Callable[..., Any],
        spec: ts.TrainingSpec,
        executor: str | tuple[str, ...] | None,
    ) -> None:
        functools.update_wrapper(self, definition(function), updated=())
        self.__wrapped__ = self.function = function
        self.spec = spec
        self.name: str = definition(function).__name__
        self.executor = executor

    def with_options(self, *, name: str | None = None, **options: Any) -> 'FreeTrainApp':
        """The same function with other settings: ``name``, from which the names of trainers are
        made, and those of :func:`freetrain_app`, such as ``total_epochs`` and ``mode``. What is not
        given stays as it is. Raises BadInput as :func:`freetrain_app`.
        """
        if name is not None:
            check_name(name)
        given = {'executor': self.executor, **self.spec.options(options), **options}
        made = freetrain_app(**given)(self.function)
        made.name = self.name if name is None else name
        return made

    def __call__(
        self, *args: Any, trainer_name: str | None = None, **kwargs: Any
    ) -> TrainingFuture:
        """Start a trainer. Raises BadInput if the trainer can never run; nothing is submitted then.

        Parameters
        ----------
        *args, **kwargs
            Arguments of the function after its fragment context. The trainer starts when all
            futures in them are done, and the function finds their values in their places.
        trainer_name
            Name of the trainer and of its checkpoint folder. Default: the function's name, with a
            number from the second call on. Set it if the order of calls may change between runs.
        seed
            In place of the seed of the mode: of the order of the data and of all random numbers.
            If the function has a parameter of this name, it gets it, too.
        """
        app, kwargs = self._seeded(kwargs)
        if app is not self:
            return app(*args, trainer_name=trainer_name, **kwargs)
        self._check_arguments(args, kwargs)
        if instead_of_calls is not None:
            return instead_of_calls(self, args, kwargs)
        dfk, executors = self._parsl()
        executor = executors[0]
        called = self.name if trainer_name is None else trainer_name
        check_name(called)
        name = executor.names.take(called, explicit=trainer_name is not None)
        others, taken = list[Checkpoint | None](), [name]

        def free() -> None:
            for replica, one in enumerate(taken):
                executors[replica % len(executors)].names.free(one)

        try:
            packed = pack(self.function, args, kwargs, name)
            check_trainer(self.spec.trainer(name), executor.policy.metric, 0, time.time())
            stores = folder_claim.stores_of(executors, name, self.spec.diloco)
            folder = stores[0].folder
            resume = self.spec.checkpoints.resume or executor.resume
            anew: Resume = 'never' if resume == 'never' else 'auto'
            checkpoint = folder_claim.claim(folder, name, self.identity(), resume)
            for replica, store in enumerate(stores[1:], 1):
                names = executors[replica % len(executors)].names
                taken.append(own := names.take(store.trainer, explicit=True))
                others.append(folder_claim.claim(store.folder, own, self.identity(), anew))
        except BaseException:
            free()
            raise
        future = _future_of_task(dfk, name)
        executor.await_arguments(future)

        def start(packed: Packed) -> None:
            # Errors are set on the future: there may be no caller left to raise to.
            if future._ended:
                free()
                return
            try:
                if packed.waits_for:
                    packed = pack(self.function, args, kwargs, name, values=True)
                if packed.waits_for:  # futures in the values of futures
                    arguments.when_done(packed.waits_for, functools.partial(start, packed))
                else:
                    values = arguments.by_name(self.function, args, kwargs)
                    changed = arguments.compare(folder, checkpoint, values)
                    what = (checkpoint, *others), packed.payload, changed
                    self._start(future, executors, dfk, stores, *what)
            except Exception as error:
                free()
                future._settle_failed(error)

        arguments.when_done(packed.waits_for, functools.partial(start, packed))
        return future

    def debug(self, *args: Any, **kwargs: Any) -> Checkpoint:
        """Train in this process, on one rank, without Parsl and nodes, so that ``pdb`` and
        ``print`` work. Exceptions are raised as they are. The checkpoint has no path: nothing is
        kept.
        """
        # torch is slow to import, and a call does not need it.
        from parsl_freetrain.training.loop.debugging import train_here

        app, kwargs = self._seeded(kwargs)
        app = app.with_options(mode=app.spec.mode) if app.spec.diloco else app  # without rounds
        args, kwargs = arguments.values_of(args, kwargs)
        return train_here(app.name, app.spec, self.function, args, kwargs)

    def _seeded(self, kwargs: dict[str, Any]) -> tuple['FreeTrainApp', dict[str, Any]]:
        """This with the seed of a call, and what the function gets."""
        seed, own = kwargs.get('seed'), 'seed' in inspect.signature(self.function).parameters
        if 'seed' not in kwargs or (own and (not isinstance(seed, int) or isinstance(seed, bool))):
            return self, kwargs
        if not isinstance(seed, int) or isinstance(seed, bool):
            refuse(f'The seed given to {self.name}', seed, 'a whole number')
        left = kwargs if own else {key: value for key, value in kwargs.items() if key != 'seed'}
        if seed == self.spec.mode.seed:
            return self, left
        return self.with_options(mode=self.spec.seeded(seed)), left

    def rehearse(
        self, *args: Any, steps: int = 12, plain: Any = None, **kwargs: Any
    ) -> 'Rehearsal':
        """Train some ``steps`` (global batches) on this computer, with the arguments of a call:
        undisturbed, cut, killed, on several ranks, with and without DataLoader workers. The answer,
        printed, is a table of what differs. ``plain``: the same as plain PyTorch, a function of an
        iterator over the global batches and of the arguments, which returns the model.
        """
        from parsl_freetrain import rehearsal  # torch is slow to import

        app, kwargs = self._seeded(kwargs)
        app = app.with_options(mode=app.spec.mode) if app.spec.diloco else app  # without rounds
        self._check_arguments(args, kwargs)
        args, kwargs = arguments.values_of(args, kwargs)
        return rehearsal.rehearse(app.name, app.spec, app.function, args, kwargs, steps, plain)

    def _parsl(self) -> tuple[DataFlowKernel, list[FreeTrainExecutor]]:
        """And the executors that train it; the first one's folder has its checkpoints."""
        try:
            dfk = DataFlowKernelLoader.dfk()
        except NoDataFlowKernelError as error:
            raise BadInput(
                f'{self.name} cannot train yet, since Parsl has no configuration: call parsl.load '
                'with one that has a FreeTrainExecutor, or run the file by freetrain run FILE.'
            ) from error
        ours = {label: e for label, e in dfk.executors.items() if isinstance(e, FreeTrainExecutor)}
        if self.executor is None and ours:
            return dfk, [next(iter(ours.values()))]
        wanted = self.executor if isinstance(self.executor, tuple) else (self.executor,)
        if wanted and all(label in ours for label in wanted):
            return dfk, [ours[label] for label in dict.fromkeys(wanted) if label is not None]
        known = ', '.join(map(repr, ours)) or 'none'
        missing = next((label for label in wanted if label not in ours), None)
        raise BadInput(
            f'Trainer {self.name!r} needs a '
            f'FreeTrainExecutor{f" labelled {missing!r}" if missing else ""} '
            f'in the Parsl configuration; it has {known}.'
        )

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal for a trainer to continue from a checkpoint."""
        mode, shapes = self.spec.mode, self.spec.shapes
        diloco, rounds = self.spec.diloco, {}
        if diloco is not None:  # replicas that have ended do not go on
            total = self.spec.total_samples or self.spec.total_epochs
            rounds = {**diloco.identity(), 'total': total}
        same = {**mode.identity(), **identity_of(shapes, mode), **rounds}
        return {'function': name_of(self.function), **same}

    def _check_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        signature = inspect.signature(self.function)
        context, *rest = signature.parameters.values()
        if all(p.kind is not p.VAR_KEYWORD for p in rest):
            known = [p.name for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            refuse_unknown(f'Trainer {self.name!r}', kwargs, [*known, 'trainer_name'])
        try:
            signature.bind(None, *args, **kwargs)
        except TypeError as error:
            raise BadInput(
                f'Trainer {self.name!r}: {error}; the function is '
                f'{self.name}({", ".join(signature.parameters)}), and FreeTrain gives it '
                f'{context.name}.'
            ) from None

    def _start(
        self,
        future: TrainingFuture,
        executors: Sequence[FreeTrainExecutor],
        dfk: DataFlowKernel,
        stores: Sequence[PosixCheckpointStore],
        newest: Sequence[Checkpoint | None],
        payload: bytes,
        changed: bool,
    ) -> None:
        if dfk.monitoring is not None:
            endpoint = dfk.monitoring.logging_endpoint
            for executor in executors:
                executor.monitoring_export.start(endpoint, executor.ledger_path, dfk.run_id)

        def launch(
            executor: FreeTrainExecutor,
            specification: Mapping[str, Any],
            previous: Future[Checkpoint] | Checkpoint,
        ) -> Future[Checkpoint]:
            if (fragment := executor.fragment_app) is None:
                how: Any = {'executors': [executor.label], 'cache': False}
                fragment = executor.fragment_app = python_app(fragment_task, dfk, **how)
            how = {'parsl_resource_specification': dict(specification)}
            task: Future[Checkpoint] = fragment(payload, previous, **how)
            return task

        first = stores[0].folder
        known = folder_claim.round_samples(first, future.name) if self.spec.diloco else None
        handed_in = folder_claim.all_handed_in(stores)
        future._replicas = [TrainingFuture(store.trainer) for store in stores[1:]]
        futures = [future, *future._replicas]
        for replica, (store, checkpoint) in enumerate(zip(stores, newest, strict=True)):
            spec = structs.replace(self.spec, replica=replica)
            trainer = spec.trainer(future.name, name_of(self.function))
            executor = executors[replica % len(executors)]
            others = [one for one in executors if one is not executor]
            executor.submit_trainer(
                TrainerRecord(
                    trainer=replace(trainer, round_samples=known),
                    spec=spec,
                    store=str(store.folder),
                    launch=functools.partial(launch, executor),
                    tell_others=functools.partial(_tell, others) if others else None,
                    future=futures[replica],
                    checkpoint=checkpoint or Checkpoint(store.trainer, '', 0, 0),
                    fragments_before=store.last_fragment(),
                    handed_in=handed_in,
                    changed_at=checkpoint.path if changed and checkpoint else '',
                )
            )
        if future._ended:  # cancelled meanwhile
            for one in future._replicas:
                one.cancel()
        if newest[0] is None:
            say_if_never(definition(self.function))
        else:
            future.add_done_callback(functools.partial(arguments.say_if_finished_before, newest[0]))


def _future_of_task(dfk: DataFlowKernel, name: str) -> TrainingFuture:
    """A trainer's, for which Parsl waits as for its own tasks (``exit_mode='wait'``)."""
    future, ended = TrainingFuture(name), Future[None]()
    future.add_done_callback(lambda _: ended.set_result(None))

    def trainer() -> Future[None]:
        return ended

    trainer.__name__ = name
    join_app(trainer, dfk, cache=False)()
    return future


def _tell(executors: Sequence[FreeTrainExecutor], told: TellReplica) -> None:
    for executor in executors:
        executor._post(told)


@checked_arguments(
    '@freetrain_app',
    ('goal=Samples', ts.Samples),
    ('mode=Reproducible', Reproducible),
    ('mode=Scaled', Scaled),
    ('mode=DiLoCo', DiLoCo),
    ('checkpoints=Checkpoints', Checkpoints),
    ('ranks=Ranks', ts.Ranks),
    ('scaling=Scaling', ts.Scaling),
    ('owner=Owner', ts.Owner),
)
def freetrain_app(
    *,
    min_nodes: Optional[AtLeast1] = None,
    max_nodes: Optional[AtLeast1] = None,
    sizes: Optional[ts.Sizes] = None,
    total_epochs: Optional[Positive] = None,
    total_samples: Optional[AtLeast1] = None,
    goal: Optional[ts.Epochs | ts.Samples] = None,
    mode: Reproducible | Throughput | Scaled | DiLoCo = Reproducible(),
    checkpoints: Checkpoints = Checkpoints(),
    ranks: ts.Ranks = ts.Ranks(),
    scaling: ts.Scaling = ts.Scaling(),
    owner: ts.Owner = ts.Owner(),
    executor: Optional[str | tuple[str, ...]] = None,
) -> Callable[[Callable[..., Any]], FreeTrainApp]:
    """Make a trainer of a PyTorch function.

    The function's first parameter is the :class:`~parsl_freetrain.FragmentContext`. Calling the
    decorated function returns a :class:`~parsl_freetrain.TrainingFuture` of the final checkpoint.

    Parameters
    ----------
    min_nodes, max_nodes
        Minimum and maximum number of nodes of a fragment. Default: the smallest and the largest of
        ``sizes``; else 1.
    sizes
        The only node counts that fragments may have, such as ``(2, 4, 8)``. A mapping also says how
        the ranks share the work: ``{2: Shape(data=2), 4: Shape(data=2, spatial=(2, 1, 1))}``, where
        data, spatial and pipeline parts multiply to the number of ranks. The function finds its
        shape in ``ctx.shape`` and ``ctx.mesh``. Of several shapes, ``{4: (Shape(shard=4),
        Shape(data=2, shard=2))}``, each is tried for some steps, and the fastest is kept. In place
        of shapes, ``'auto'`` means all ways to divide the ranks into ``data`` and ``shard``, for
        models that the function gives to ``ctx.shard``: ``{2: 'auto', 4: 'auto'}``. Default: all
        counts from ``min_nodes`` to ``max_nodes``; ``sizes='auto'``: the same, and ``'auto'`` for
        each.
    total_epochs, total_samples
        Total amount of training; short for ``goal=Epochs(...)`` and ``goal=Samples(...)``.
    goal
        :class:`~parsl_freetrain.Epochs` or :class:`~parsl_freetrain.Samples`: the total amount of
        training, and a deadline. Give one of ``total_epochs``, ``total_samples`` and ``goal``.
    mode
        :class:`~parsl_freetrain.Reproducible`: the same weights to the last bit for any sequence of
        node counts; :class:`~parsl_freetrain.Throughput`: torch's DistributedDataParallel;
        :class:`~parsl_freetrain.Scaled`: the same with a global batch that grows with the ranks;
        :class:`~parsl_freetrain.DiLoCo`: rounds of independent pieces on nodes that need not reach
        each other, each on ``min_nodes`` to ``max_nodes``.
    checkpoints
        When checkpoints are written, and which are kept and read.
    ranks
        The processes on each node.
    scaling
        Training speed by node count, and the cost of changing it. Default: measured.
    owner
        User and group, to which the limits of the executor's policy apply, and priority.
    executor
        Label of the FreeTrainExecutor; default the first of the configuration. With ``DiLoCo``, a
        tuple of several, to which replicas are dealt in turn; without its ``transport``,
        checkpoints are in the first one's folder, which the nodes of all must see.
    """
    given = {name: value for name, value in locals().items() if name != 'executor'}

    def decorate(function: Callable[..., Any]) -> FreeTrainApp:
        name = definition(function).__name__
        where = f'@freetrain_app on {name!r}'
        if wrong := unfit(function):
            raise BadInput(f'{where}: {wrong}.')
        try:
            spec = ts.TrainingSpec.of(**given)
        except BadInput as error:
            raise BadInput(f'{where}: {error}') from None
        if isinstance(executor, tuple) and len(executor) != 1 and spec.diloco is None:
            refuse(f'{where}: executor', executor, 'one label, but with mode=DiLoCo(...)')
        spec.trainer(name)
        return FreeTrainApp(function, spec, executor)

    return decorate
