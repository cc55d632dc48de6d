"""Parsl's HighThroughputExecutor, with blocks in a site's holes and trainers that run in them."""

import logging
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional, Self

import psutil
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.states import JobStatus

from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.checked_settings import checked_arguments
from parsl_freetrain.core.model.checked_values import Count
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, TrainerFailed
from parsl_freetrain.executor import commands
from parsl_freetrain.executor import settings as groups
from parsl_freetrain.executor.block.adoption import TEMPLATE, Adoption
from parsl_freetrain.executor.block.block_record import BlockLogs
from parsl_freetrain.executor.block.blocks import BlockManager
from parsl_freetrain.executor.event_loop import EventLoop
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint
from parsl_freetrain.executor.fragment.node_fork_server import start_template
from parsl_freetrain.executor.fragment.runner import FRAGMENT, SETTLED_S, FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.ledger_exports import MetricExport, MonitoringExport
from parsl_freetrain.executor.off_loop import FileThread
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.progress import FutureUpdater, ProgressLine, ReplicasElsewhere
from parsl_freetrain.executor.requests import RequestHandler, Requests, requests_folder
from parsl_freetrain.executor.run_lock import RunLock, keep_others_out, refuse_unquotable
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.executor.trainer.future import TrainerNames, TrainingFuture
from parsl_freetrain.host.clocks import RunClock
from parsl_freetrain.host.processes import StopSignals, allow_open_files
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.sites.named import chosen_provider, site_described
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.solver import allocator_named, close_allocator
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.retention import Resume

logger = logging.getLogger(__name__)


class FreeTrainExecutor(HighThroughputExecutor):
    """Runs trainers, and ordinary Parsl apps beside them, in blocks that fill a site's holes.

    Use it in a :class:`parsl.config.Config`. It opens and closes its blocks itself; Parsl's scaling
    strategy concerns other executors only.

    Parameters
    ----------
    provider
        A :class:`~parsl_freetrain.sites.provider.BackfillProvider`; None: use ``site``.
    label
        The executor's name in Parsl, and the name of its folder in runinfo/.
    checkpoint_dir
        Folder on a file system that all nodes share. It has one folder per trainer.
    recording
        Where the record of the run goes.
    policy
        The aim of scheduling decisions, and their limits.
    timeouts
        Time limits, after which a step is given up.
    htex
        Options of Parsl's HighThroughputExecutor.
    max_workers_per_node
        Maximum number of ordinary Parsl tasks that run on a node at the same time, beside its
        fragment; 0: none.
    resume
        What trainers do with checkpoints of an earlier run: 'auto' (use them), 'require' (fail if
        there are none) or 'never' (move them aside).
    site, account, queue
        Instead of ``provider``: the name of a site in ``site_configs/``, or a TOML file, the
        account to charge, and the queue; None: the site's default. The executor builds its
        ``provider`` from them and then sets them to None.
    """

    @checked_arguments(
        'FreeTrainExecutor',
        *((f'{name}={group.__name__}', group) for name, group in groups.GROUPS.items()),
    )
    def __init__(
        self,
        provider: Optional[BackfillProvider] = None,
        label: str = 'freetrain',
        checkpoint_dir: str = 'checkpoints',
        recording: groups.Recording = groups.Recording(),
        policy: groups.Policy = groups.Policy(),
        timeouts: groups.Timeouts = groups.Timeouts(),
        htex: groups.HtexOptions = groups.HtexOptions(),
        max_workers_per_node: Count = 1,
        resume: Resume = 'auto',
        site: Optional[str] = None,
        account: Optional[str] = None,
        queue: Optional[str] = None,
    ) -> None:
        provider = chosen_provider(provider, site, account, queue)
        groups.check_solver(policy, provider.site)
        super().__init__(
            label=label,
            provider=provider,
            # max_workers_per_node alone determines the number of workers
            cores_per_worker=1e-9,
            block_error_handler=False,  # losing blocks is normal here
            **htex.arguments(provider.site.interface, timeouts.hang_s),
        )
        # Once, since the program may change its folder later.
        self.checkpoint_dir = os.path.abspath(checkpoint_dir)
        journal = Path(recording.ledger or f'{self.checkpoint_dir}/ledger.journal')
        self.ledger_path = journal.absolute()  #: the journal of the run
        self.recording = recording
        self.policy, self.timeouts, self.htex = policy, timeouts, htex
        self.max_workers_per_node, self.resume = max_workers_per_node, resume
        self.site = self.account = self.queue = None
        self.allocator: Allocator = (
            allocator_named(policy.solver, policy.solver_time_limit_s)
            if isinstance(policy.solver, str)
            else policy.solver
        )
        self._loop: EventLoop | None = None
        self._template: ForkClient | None = None
        self._lock: RunLock | None = None
        self._signals = StopSignals()
        self._adoption: Adoption | None = None
        self._parsl: ParslSide | None = None
        self._environment_command = ''  # what unpacks the nodes' environment
        self.names, self.monitoring_export = TrainerNames(), MonitoringExport()
        self._futures: set[TrainingFuture] = set()  # that are not settled
        self.fragment_app: Callable[..., Any] | None = None  # Parsl's, of fragments
        self._metrics = MetricExport()

    @classmethod
    def described(cls, settings: Mapping[str, Any], label: str, checkpoint_dir: str) -> Self:
        """The executor of plain data: its settings, its provider's, and a described site."""
        given = dict(settings)
        site = site_described(given.pop('site', ''))
        known = ('max_blocks', 'min_hole_s', 'worker_init')
        provider = BackfillProvider(site, **{n: given.pop(n) for n in known if n in given})
        for name in groups.GROUPS.keys() & given.keys():
            given[name] = groups.GROUPS[name](**given[name])
        return cls(provider, label, checkpoint_dir, **given)

    @property
    def status_polling_interval(self) -> float:
        """0: Parsl's poller and scaling strategy leave this executor to its event loop."""
        return 0

    def validate_resource_spec(self, resource_specification: dict[str, Any]) -> None:
        known = {k: v for k, v in resource_specification.items() if k != FRAGMENT}
        super().validate_resource_spec(known)

    def start(self) -> None:
        """Start Parsl's part, the site and the event loop. If one fails, stop the others."""
        if self._lock is not None:
            anew = 'make a new one, with a new provider, for each parsl.load'
            raise BadInput(f'Executor {self.label!r} was started before; {anew}.')
        with ExitStack() as undo:
            self._start(undo)
            undo.pop_all()
        self._signals.begin()

    def _start(self, undo: ExitStack) -> None:
        refuse_unquotable(self.logdir)
        provider, folder = self.provider, Path(self.checkpoint_dir)
        assert isinstance(provider, BackfillProvider)
        keep_others_out(folder, self.run_dir)
        allow_open_files()
        lock = self._lock = RunLock(folder, f'{self.run_id} {self.label}')
        lock.take_folder()
        undo.callback(lock.free_folder)
        adopt_s, run = self.timeouts.adopt_s, str(self.run_id)
        adoption = self._adoption = Adoption(provider, folder, self.label, run, adopt_s)
        adoption.begin()
        workers = int(self.max_workers_per_node)
        settings = groups.controller_settings(self.policy, provider, self.ledger_path, workers)
        records: dict[str, TrainerRecord] = {}
        journal = self._begin_journal(settings, undo)
        undo.callback(self.shutdown)
        if (environment := provider.environment) is not None:
            self._environment_command = environment.prepare(folder)
        log_dir = str(folder / 'logs')
        agent = f'{self._environment_command} {adoption.node_command()}'.strip()
        if provider.site.is_local:
            # Nodes are processes of this computer, so torch is imported once for all of them.
            self._template = start_template(log_dir)
        else:
            agent += TEMPLATE.format(shlex.quote(log_dir))
        parsl = self._parsl = ParslSide(self, agent, lock)
        try:
            super().start()  # type: ignore[no-untyped-call]
        except Exception as error:  # Parsl raises a bare Exception without a reason
            if trouble := parsl.trouble():
                raise FreeTrainError(f'{trouble}.') from error
            raise
        provider.site.start()
        adopted = adoption.take_over(parsl)
        control = ControlServer(self.cert_dir, self.address, self.htex.interchange_port_range)
        undo.callback(control.close)
        shown = ProgressLine(sys.stderr, records, self.ledger_path)
        told = FutureUpdater(records), ReplicasElsewhere(records), shown
        stream = Stream(told, [journal, lock], FileThread())
        self._loop = self._event_loop(settings, parsl, control, stream, records, log_dir)
        for block in adopted:
            self._loop.post(block)
        self._loop.start()
        self._metrics.start(self.recording.loggers, self.ledger_path, str(self.run_id))

    def _begin_journal(self, settings: ControllerSettings, undo: ExitStack) -> JournalWriter:
        policy = self.policy
        decisions = DecisionSettings(settings, policy.solver_name, policy.solver_time_limit_s)
        journal = JournalWriter(self.ledger_path)
        undo.callback(journal.close)
        process = platform.node(), os.getpid(), psutil.Process().create_time(), os.getcwd()
        folder, command = self.checkpoint_dir, shlex.join(sys.orig_argv)
        run = str(self.run_id), str(self.run_dir), command, *process, folder
        journal.begin_run(ev.RunBegan(time.time(), *run, decisions.plain()))
        undo.callback(lambda: journal.take(ev.RunEnded(time.time(), 'not started')))
        return journal

    def _event_loop(
        self,
        settings: ControllerSettings,
        parsl: ParslSide,
        control: ControlServer,
        stream: Stream,
        records: dict[str, TrainerRecord],
        log_dir: str,
    ) -> EventLoop:
        assert isinstance(self.provider, BackfillProvider)
        site, template = self.provider.site, self._template.name if self._template else None
        seen = sorted(self.all_addresses), control.port, self.cert_dir, site.interface
        endpoint = ControlEndpoint(*seen, log_dir, template)
        clock = RunClock()
        fragments = FragmentRunner(control, stream, endpoint, self.timeouts, parsl, records, clock)
        stream.subscribers.append(fragments)
        provider, join_s = self.provider, self.timeouts.join_s
        logs = BlockLogs(self.worker_logdir, log_dir, lambda: provider.script_dir, stream.beside)
        blocks = BlockManager(
            provider, stream, control, log_dir, parsl, template, join_s, clock, logs
        )
        handler = RequestHandler(Requests(requests_folder(self.ledger_path)), fragments, stream)
        parts = stream, site, blocks, fragments, parsl, handler, clock
        return EventLoop(Controller(self.allocator, settings), control, *parts)

    def initialize_scaling(self) -> None:
        ordinary = self.max_workers_per_node
        self.max_workers_per_node = ordinary + 1
        try:
            super().initialize_scaling()  # type: ignore[no-untyped-call]
        finally:
            self.max_workers_per_node = ordinary

    def await_arguments(self, future: TrainingFuture) -> None:
        """A trainer that is submitted when its arguments are there, or fails at shutdown."""
        self._futures.add(future)
        future.add_done_callback(lambda _: self._futures.discard(future))

    def submit_trainer(self, record: TrainerRecord) -> None:
        """Pass a trainer to the event loop; BadInput if it does not run, or has no such metric."""
        if self._loop is None:
            raise BadInput(
                f'Trainer {record.trainer.name!r} cannot be submitted: executor {self.label!r} is '
                'not running; call parsl.load with a config that has it first.'
            )
        groups.check_trainer(
            record.trainer, self.policy.metric, record.checkpoint.samples, time.time()
        )
        assert isinstance(self.provider, BackfillProvider)
        groups.check_classes(record.trainer, self.provider.site)
        loop, name = self._loop, record.trainer.name
        end = commands.CancelTrainer(name)
        if not record.future._submitted(lambda: loop.post(record), lambda: self._post(end)):
            self.names.free(name)

    def submit_payload(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Send an ordinary task to the interchange, a fragment to the event loop and its nodes."""
        if self.bad_state_is_set:
            raise self.executor_exception
        if FRAGMENT in context.get('resource_spec', {}):
            outer = HTEXFuture(0)
            if self._loop is None:
                outer.set_exception(BadInput(f'Executor {self.label!r} has been shut down.'))
            else:
                self._loop.post(commands.TaskArrived(context, buffer, outer))
            return outer
        if self.max_workers_per_node == 0:
            raise BadInput(
                f'Executor {self.label!r} runs no ordinary Parsl apps because its '
                'max_workers_per_node is 0; raise it, or send the app to another executor.'
            )
        earlier = context.get('task_executor', {})
        name = 'parsl_freetrain.executor.fragment.worker_tasks.run_ordinary'
        given = (earlier.get('f'), *earlier.get('a', ()))
        context = {**context, 'task_executor': {'f': name, 'a': given, 'k': earlier.get('k', {})}}
        assert self._parsl is not None
        future = self._parsl.submit(context, buffer)
        self._post(commands.OrdinaryTasks(+1))
        future.add_done_callback(lambda _: self._post(commands.OrdinaryTasks(-1)))
        return future

    def _post(self, command: commands.Command) -> None:
        if (loop := self._loop) is not None:
            loop.post(command)

    def status(self) -> dict[str, JobStatus]:
        """The provider's answer, without MISSING (Parsl's for a block taken early: a failure)."""
        statuses: dict[str, JobStatus] = BlockProviderExecutor.status(self)
        return statuses

    def quiesce(self) -> None:
        """Stop all fragments with a checkpoint, for good, in at most ``timeouts.stop_grace_s``."""
        if self._loop is not None:
            quiet = threading.Event()
            self._loop.post(commands.Quiesce(quiet))
            quiet.wait(self.timeouts.stop_grace_s)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the event loop, the blocks and the interchange. Fragments save checkpoints first."""
        self.quiesce()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(timeout)
        for future in list(self._futures):
            if future.state == 'waiting':
                why = 'its arguments were not there when its executor was shut down'
                error = TrainerFailed(f'Trainer {future.name!r} was not started: {why}.')
                future._settle_failed(error)
        wait(list(self._futures), SETTLED_S)
        self.monitoring_export.stop()
        self._metrics.stop()
        close_allocator(self.allocator)
        self._wait_for_blocks(timeout / 2)
        super().shutdown(timeout)
        if self._template is not None:
            self._template.stop(0.5)
            self._template = None
        if isinstance(self.provider, BackfillProvider):
            self.provider.site.close()
        if self._adoption is not None:
            self._adoption.end()
        if self._lock is not None:
            self._lock.free_folder()
        self._signals.end()

    def _wait_for_blocks(self, timeout_s: float) -> None:
        assert self.provider is not None
        end = time.monotonic() + timeout_s
        jobs = list(self.blocks_to_job_id.values())
        while jobs and time.monotonic() < end:
            if all(status.terminal for status in self.provider.status(jobs)):
                return
            time.sleep(0.1)
