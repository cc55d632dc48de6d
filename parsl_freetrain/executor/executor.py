"""FreeTrainExecutor: Parsl's HighThroughputExecutor whose blocks fill holes and whose planner runs trainers in them."""

from __future__ import annotations

import logging
import math
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import typeguard
from parsl.data_provider.staging import Staging
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.core.controller import Controller
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.state import ControllerSettings
from parsl_freetrain.core.words import BlockRequest
from parsl_freetrain.executor.adoption import Adoption
from parsl_freetrain.executor.blocks import BlockKeeper
from parsl_freetrain.executor.control import ControlServer
from parsl_freetrain.executor.fragments import FRAGMENT, FragmentRunner, Line, Patience
from parsl_freetrain.executor.member import start_template
from parsl_freetrain.executor.mirror import Mirror
from parsl_freetrain.executor.planner import (
    Adopted,
    Arrived,
    Cancel,
    GreetingBack,
    MemberBack,
    Ordinary,
    Planner,
    Quiesce,
    Submit,
)
from parsl_freetrain.executor.record import about_this_process
from parsl_freetrain.executor.requests import Requests, requests_folder
from parsl_freetrain.executor.settings import check_settings, check_trainer
from parsl_freetrain.executor.trainers import TrainerNames, TrainerRecord
from parsl_freetrain.ledger.store import Ledger
from parsl_freetrain.sites.named import chosen_provider
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.solver import allocator_named, close_allocator
from parsl_freetrain.training.warm import WarmParent

logger = logging.getLogger(__name__)

INTERCHANGE = (sys.executable, '-m', 'parsl_freetrain.executor.interchange')


class FreeTrainExecutor(HighThroughputExecutor):
    """Runs trainers, and ordinary Parsl apps beside them, in blocks that fill a site's holes.

    Use it in a :class:`parsl.config.Config` with ``strategy='none'``: it opens and closes its blocks itself.

    Parameters
    ----------
    label
        The executor's name in Parsl; it also names its folder in runinfo/.
    provider
        A :class:`~parsl_freetrain.sites.provider.BackfillProvider`; None: that of ``site``.
    checkpoint_dir
        Folder on a file system that all nodes share; each trainer has a folder of its name in it.
    ledger
        The SQLite file that everything is recorded in; default ``ledger.sqlite`` in ``checkpoint_dir``.
    metric
        What the allocation maximises: 'throughput' (samples per second), 'speedup' (relative to one node), 'priority' (speed-up weighted by
        the trainers' priorities), 'deadline', 'goodput', or an expression; see :func:`parsl_freetrain.core.objectives.objective_named`.
    horizon_s
        How far ahead a decision looks, in seconds.
    trainers_at_a_time
        Only the first so many unfinished trainers get nodes; None: all.
    min_rescale_s
        So many seconds pass between two rescales of a trainer, at least, unless nodes are taken from it.
    keep_free, max_nodes
        So many nodes of those that are there are left idle; so many are used at once, at most; None: all.
    caps
        So many nodes a user's or group's trainers may have at once: ``{'user anna': 8, 'group physics': 64}``.
    retries
        Errors of its own code that a trainer survives; preemptions cost none.
    resume
        What trainers do with checkpoints of an earlier run that they find: 'auto', 'require' or 'never'.
    allocator
        The solver's name ('auto', 'milp' or 'equal-share'), or anything with
        :meth:`~parsl_freetrain.core.allocation.Allocator.allocate`; one that has a ``close()`` is closed at shutdown.
    solver_time_limit_s
        A solver that ``allocator`` names takes the best allocation that it has found after so many seconds.
    max_workers_per_node
        Ordinary Parsl tasks that a node runs at once, beside its fragment; 0: none.
    idle_block_s
        A block on which nothing ran for so many seconds is given back.
    stop_grace_s
        At shutdown fragments get so many seconds to write a checkpoint.
    adopt_s
        Should this process die, blocks of a batch system wait so many seconds for the next one with the same checkpoint_dir and label,
        which goes on with them; 0: they end.
    start_s, stop_s
        Patience, in seconds: for a fragment's first step, and for a requested stop.
    hang_s
        A rank that is stopped, or a node or network that gives no sign of life, ends its fragment within so many seconds. A step
        that takes long does not. It is also the default of ``heartbeat_threshold``.
    step_s
        A fragment in which no training step ends for so many seconds, as in an endless loop, is ended.
    address, worker_port_range, interchange_port_range, worker_debug, encrypted
        As in :class:`parsl.executors.HighThroughputExecutor`.
    heartbeat_period, heartbeat_threshold, poll_period, worker_logdir_root, launch_cmd
        As in :class:`parsl.executors.HighThroughputExecutor`.
    working_dir, storage_access, interchange_launch_cmd
        As in :class:`parsl.executors.HighThroughputExecutor`.

    site, account, queue
        A site by its name in ``site_configs/``, who pays there, and the queue; None: the site's default.

    Raises
    ------
    BadInput
        If a setting cannot be used.
    """

    @typeguard.typechecked
    def __init__(self,
                 provider: Optional[BackfillProvider] = None,
                 label: str = 'freetrain',
                 checkpoint_dir: str = 'checkpoints',
                 ledger: Optional[str] = None,
                 metric: str = 'throughput',
                 horizon_s: float = 120.0,
                 trainers_at_a_time: Optional[int] = None,
                 min_rescale_s: float = 0.0,
                 keep_free: int = 0,
                 max_nodes: Optional[int] = None,
                 caps: Optional[dict[str, int]] = None,
                 retries: int = 0,
                 resume: str = 'auto',
                 allocator: Any = 'auto',
                 solver_time_limit_s: float = 2.0,
                 max_workers_per_node: int = 1,
                 idle_block_s: float = 30.0,
                 stop_grace_s: float = 6.0,
                 adopt_s: float = 300.0,
                 start_s: float = 120.0,
                 stop_s: float = 120.0,
                 hang_s: float = 15.0,
                 step_s: float = 1800.0,
                 address: Optional[str] = None,
                 worker_port_range: tuple[int, int] = (54000, 55000),
                 interchange_port_range: tuple[int, int] = (55000, 56000),
                 worker_debug: bool = False,
                 encrypted: bool = True,
                 heartbeat_period: int = 5,
                 heartbeat_threshold: Optional[int] = None,
                 poll_period: int = 100,
                 worker_logdir_root: Optional[str] = None,
                 launch_cmd: Optional[str] = None,
                 working_dir: Optional[str] = None,
                 storage_access: Optional[list[Staging]] = None,
                 interchange_launch_cmd: Optional[Sequence[str]] = None,
                 site: Optional[str] = None,
                 account: Optional[str] = None,
                 queue: Optional[str] = None) -> None:
        check_settings(metric=metric, resume=resume, horizon_s=horizon_s, hang_s=hang_s, step_s=step_s, retries=retries,
                       max_workers_per_node=max_workers_per_node, trainers_at_a_time=trainers_at_a_time,
                       min_rescale_s=min_rescale_s, keep_free=keep_free, max_nodes=max_nodes, caps=caps,
                       solver_time_limit_s=solver_time_limit_s)
        provider = chosen_provider(provider, site, account, queue)
        super().__init__(
            label=label, provider=provider, address=address or ('127.0.0.1' if provider.site.interface == 'lo' else None),
            worker_port_range=worker_port_range, interchange_port_range=interchange_port_range, worker_debug=worker_debug,
            encrypted=encrypted, heartbeat_period=heartbeat_period,
            heartbeat_threshold=heartbeat_threshold or max(3 * heartbeat_period, math.ceil(hang_s)), poll_period=poll_period,
            worker_logdir_root=worker_logdir_root, launch_cmd=launch_cmd, working_dir=working_dir, storage_access=storage_access,
            interchange_launch_cmd=interchange_launch_cmd or INTERCHANGE,
            cores_per_worker=1e-9,        # how many workers a node has is said by max_workers_per_node alone
            block_error_handler=False)    # a lost block is normal life here
        self.site, self.account, self.queue = site, account, queue
        self.max_workers_per_node = max_workers_per_node
        self.checkpoint_dir = checkpoint_dir
        self.ledger = ledger
        self.metric = metric
        self.horizon_s = horizon_s
        self.trainers_at_a_time = trainers_at_a_time
        self.min_rescale_s, self.keep_free, self.max_nodes, self.caps = min_rescale_s, keep_free, max_nodes, caps
        self.retries = retries
        self.resume = resume
        self.allocator: Allocator = (
            allocator_named(allocator, solver_time_limit_s) if isinstance(allocator, str) else allocator)
        self.solver_time_limit_s = solver_time_limit_s
        self.idle_block_s = idle_block_s
        self.stop_grace_s = stop_grace_s
        self.adopt_s = adopt_s
        self.start_s = start_s
        self.stop_s = stop_s
        self.hang_s, self.step_s = hang_s, step_s
        self._submitting = threading.Lock()
        self.names = TrainerNames()
        self._planner: Planner | None = None
        self._template: WarmParent | None = None
        self.mirror = Mirror()
        self._adoption: Adoption | None = None
        self._opening: BlockRequest | None = None
        self._refusal: Exception | None = None
        self._control_ports = interchange_port_range

    @property
    def ledger_path(self) -> Path:
        """The SQLite file that everything is recorded in."""
        return Path(self.ledger) if self.ledger else Path(self.checkpoint_dir).absolute() / 'ledger.sqlite'

    @property
    def status_polling_interval(self) -> float:
        """0: Parsl's poller and its scaling strategy, whichever it is, leave this executor to its own planner."""
        return 0

    def validate_resource_spec(self, resource_specification: dict[str, Any]) -> None:
        super().validate_resource_spec({k: v for k, v in resource_specification.items() if k != FRAGMENT})

    def start(self) -> None:
        """Start Parsl's part, the site and the planner."""
        provider = self.provider
        assert isinstance(provider, BackfillProvider)
        self._adoption = Adoption(provider, Path(self.checkpoint_dir), self.label, str(self.run_id), self.adopt_s)
        self._adoption.begin()
        ledger = Ledger(self.ledger_path)
        requests = Requests(requests_folder(self.ledger_path))
        ledger.begin_run(str(self.run_id), at=time.time(), parsl_run_dir=str(self.run_dir), command=shlex.join(sys.orig_argv),
                         about=about_this_process(self.checkpoint_dir))
        log_dir = str(Path(self.checkpoint_dir).absolute() / 'logs')
        if provider.site.interface == 'lo':   # the nodes are processes of this computer: torch is imported once for all of them
            self._template = start_template(log_dir)
        template = self._template.name if self._template is not None else None
        super().start()  # type: ignore[no-untyped-call]
        try:
            provider.site.start()
            adopted = self._adoption.take_over(self._register)
        except BaseException:   # bad input: nothing of what was started for it may stay
            ledger.close()
            self.shutdown()
            raise
        controller = Controller(self.allocator, ControllerSettings(
            horizon_s=self.horizon_s, min_hole_s=provider.min_hole_s, max_blocks=provider.max_blocks, metric=self.metric,
            spans_blocks=provider.site.spans_blocks, trainers_at_a_time=self.trainers_at_a_time, retries=self.retries,
            min_rescale_s=self.min_rescale_s, keep_free=self.keep_free, max_nodes=self.max_nodes, caps=self.caps or {},
            idle_block_s=self.idle_block_s, workers_per_node=max(1, int(self.max_workers_per_node))))
        control = ControlServer(self.cert_dir, self.address, self._control_ports)
        line = Line(sorted(self.all_addresses), control.port, self.cert_dir, provider.site.interface, template)
        fragments = FragmentRunner(
            control, ledger, line, Patience(self.start_s, self.stop_s, self.hang_s, step_s=self.step_s), self._submit_inner,
            lambda name, number, member, done: self._post(MemberBack(name, number, member, done)))
        blocks = BlockKeeper(
            provider, ledger, log_dir, self._open_block, self.connected_managers,
            self._submit_inner, lambda block, manager, done: self._post(GreetingBack(block, manager, done)), template)
        self._planner = Planner(controller, control, ledger, provider, blocks, fragments, self._ask_statuses,
                                self._trouble, str(self.run_id), requests)
        for block in adopted:
            self._post(Adopted(block))
        self._planner.start()

    def initialize_scaling(self) -> None:
        """Compose the launch command: one worker more than asked for, which the interchange keeps for fragments."""
        ordinary = self.max_workers_per_node
        self.max_workers_per_node = ordinary + 1
        try:
            super().initialize_scaling()  # type: ignore[no-untyped-call]
        finally:
            self.max_workers_per_node = ordinary

    def submit_trainer(self, record: TrainerRecord) -> None:
        """Hand a trainer to the planner; its future tells the rest.

        Raises
        ------
        BadInput
            If the executor has not been started by :func:`parsl.load`, or has been shut down, or its metric is not for this trainer.
        """
        if self._planner is None:
            raise BadInput(f'Trainer {record.trainer.name!r} cannot be submitted: executor {self.label!r} is not running; '
                           f'call parsl.load with a config that has it first.')
        check_trainer(record.trainer, self.metric, record.checkpoint.samples, time.time())
        record.future._on_cancel = lambda: self._post(Cancel(record.trainer.name))
        self._post(Submit(record))

    def submit_payload(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Send an ordinary task to the interchange, or a fragment to the planner, which fans it out."""
        if self.bad_state_is_set:
            raise self.executor_exception
        if FRAGMENT in context.get('resource_spec', {}):
            outer = HTEXFuture(0)
            self._post(Arrived(context, buffer, outer))
            return outer
        if self.max_workers_per_node == 0:
            raise BadInput(f'Executor {self.label!r} runs no ordinary Parsl apps because its max_workers_per_node is 0; '
                           f'raise it, or send the app to another executor.')
        earlier = context.get('task_executor', {})
        context = {**context, 'task_executor': {'f': 'parsl_freetrain.executor.member.run_ordinary',
                                                'a': (earlier.get('f'), *earlier.get('a', ())), 'k': earlier.get('k', {})}}
        future = self._submit_inner(context, buffer)
        self._post(Ordinary(+1))
        future.add_done_callback(lambda _: self._post(Ordinary(-1)))
        return future

    def _submit_inner(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Parsl's own submission, which is made for one thread; here Parsl's thread and the planner both submit."""
        with self._submitting:
            return super().submit_payload(context, buffer)

    def _post(self, item: object) -> None:
        if self._planner is not None:
            self._planner.post(item)

    def _open_block(self, request: BlockRequest) -> tuple[str, str]:
        """Open a block through Parsl, which notes a failure and goes on; here it is raised."""
        self._opening, self._refusal = request, None
        opened = self.scale_out_facade(1)
        if self._refusal is not None:
            raise self._refusal
        return opened[0], str(self.blocks_to_job_id[opened[0]])

    def _launch_block(self, block_id: str) -> Any:
        """Called by Parsl in :meth:`scale_out_facade`; the hole to fill is the one that the planner decided on."""
        assert isinstance(self.provider, BackfillProvider)
        if self._opening is None:
            raise BadInput(f"Executor {self.label!r} opens its blocks itself; use it with Config(strategy='none').")
        request, self._opening = self._opening, None
        assert self._adoption is not None
        command = f'{self._adoption.node_command()} {self._get_launch_command(block_id)}'
        if request.walltime_s is not None:
            command += f' --drain_period={max(1, int(request.walltime_s))}'   # the last one given counts
        try:
            return self.provider.open_block(command, request, f'parsl.{self.label}.block-{block_id}')
        except Exception as error:
            self._refusal = error
            raise

    def _register(self, job_id: str) -> tuple[str, str]:
        """A job that another process has submitted as a block of Parsl's; its id, and how its nodes reach this run."""
        block_id = str(self._block_id_counter.get_id())
        self.blocks_to_job_id[block_id], self.job_ids_to_block[job_id] = job_id, block_id
        self._status[block_id] = JobStatus(JobState.PENDING)
        return block_id, self._get_launch_command(block_id)

    def _trouble(self) -> str:
        if self.interchange_proc is None or self.interchange_proc.poll() is None:
            return ''
        return (f"Parsl's interchange has ended with status {self.interchange_proc.returncode}; "
                f'its log is {self.logdir}/interchange.log, and a new run continues from the checkpoints')

    def _ask_statuses(self) -> dict[str, JobStatus]:
        self.poll_facade()
        return {block: status for block, status in self.status_facade.items() if status.state is not JobState.SCALED_IN}

    def status(self) -> dict[str, JobStatus]:
        """As the provider says. Parsl's own would call a block that was taken before its nodes had started MISSING, a failure."""
        statuses: dict[str, JobStatus] = BlockProviderExecutor.status(self)
        return statuses

    def quiesce(self) -> None:
        """Stop every fragment with a checkpoint, waiting at most ``stop_grace_s`` seconds; nothing starts afterwards."""
        if self._planner is not None:
            quiet = threading.Event()
            self._post(Quiesce(quiet))
            quiet.wait(self.stop_grace_s)

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the planner, the blocks and the interchange; nothing is left running and nothing is lost."""
        self.quiesce()
        planner, self._planner = self._planner, None
        if planner is not None:
            planner.stop(timeout)
        self.mirror.stop()
        close_allocator(self.allocator)
        self._wait_for_blocks(timeout / 2)
        super().shutdown(timeout)
        if self._template is not None:
            self._template.stop(0.5)
        if isinstance(self.provider, BackfillProvider):
            self.provider.site.close()
        if self._adoption is not None:
            self._adoption.end()

    def _wait_for_blocks(self, timeout_s: float) -> None:
        assert self.provider is not None
        end = time.monotonic() + timeout_s
        jobs = list(self.blocks_to_job_id.values())
        while jobs and time.monotonic() < end:
            if all(status.terminal for status in self.provider.status(jobs)):
                return
            time.sleep(0.1)
