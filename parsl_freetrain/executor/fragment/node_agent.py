"""The tasks of a Parsl worker on a node: the node's greeting, and its share of a fragment's ranks.

The worker itself never imports torch. It asks the node's fork server for ranks, passes messages
between them and the executor, and ends them on behalf of the executor or the manager.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import multiprocessing
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from parsl.executors.execute_task import execute_task

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.executor.fragment.control_channel import ControlClient
from parsl_freetrain.executor.fragment.member_order import MemberOrder
from parsl_freetrain.executor.fragment.rank_result import RankResult
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.liveness import StopWatch
from parsl_freetrain.training.process.node_agent import (
    NOTICES,
    heed_notices,
    ignore_notices,
    listen_for_notices,
    template_of_node,
)
from parsl_freetrain.training.process.rank_process import RankProcess
from parsl_freetrain.training.spec.messages import (
    LEAVING_S,
    Abandon,
    Alive,
    AreYouThere,
    Exit,
    FromRank,
    Hello,
    LeavingState,
    NodeStays,
    Notice,
    Outcome,
    RankEnded,
    RankPid,
    Rendezvous,
    StandbyReady,
    StartStandby,
    StopTraining,
    ToMember,
    ToRank,
    Waiting,
)
from parsl_freetrain.training.spec.order import RankPlace

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_FORK_SERVER_READY_S = 120.0
_STOPPED_SHARE = 0.5  # of hang_s, until a stopped rank is killed; the rest is for the others


_order: ContextVar[MemberOrder] = ContextVar('member_order')


def fragment_task(
    payload: bytes, checkpoint: Any = None, parsl_resource_specification: Any = None
) -> list[RankResult]:
    """The Parsl task of a fragment, as each of its nodes runs it.

    Parameters
    ----------
    payload
        The user's function and its arguments, pickled by cloudpickle.
    checkpoint
        The previous fragment's checkpoint. It makes the chain of fragments visible to Parsl; the
        ranks find the newest good checkpoint themselves.

    Returns
    -------
    list of RankResult
        One for each of this node's ranks.
    """
    order = _order.get()
    if order.ahead_s is not None:
        start_standby(order, payload, order.ahead_s)
        return []
    return Member(order).run(payload)


def run_member(buffer: bytes, order: MemberOrder, execute: str | None = None) -> Any:
    """Parsl's ``task_executor`` hook for fragments: run the task as ``order`` says. ``execute`` is
    the hook that was set before, if any.
    """
    _order.set(order)
    ignore_notices()
    return _executing(execute)(buffer)


def run_ordinary(buffer: bytes, execute: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Parsl's ``task_executor`` hook for all other tasks. Processes that they start must end on
    SIGTERM, as programs expect.

    ``execute`` is the hook that was set before, if any, with its arguments.
    """
    heed_notices()
    return _executing(execute)(buffer, *args, **kwargs)


def _executing(execute: str | None) -> Callable[..., Any]:
    if not execute:
        return execute_task
    module, _, name = execute.rpartition('.')
    run: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return run


def start_standby(order: MemberOrder, payload: bytes, wait_s: float) -> list[Channel[FromRank]]:
    """Start this node's standby ranks for the next fragment. Each channel becomes readable when its
    rank waits.
    """
    server = fork_server_of_node(order.node_log_dir, order.template)
    server.wait_ready(_FORK_SERVER_READY_S)
    Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = [
        str(
            Path(order.log_dir)
            / f'ahead-of-{order.fragment.fragment:06d}-{os.environ["PARSL_WORKER_POOL_ID"]}-{i}.log'
        )
        for i in range(order.fragment.per_node)
    ]
    return [
        server.start_standby(order.fragment, i, payload, {}, log, wait_s)
        for i, log in enumerate(logs)
    ]


def greet(
    buffer: bytes, log_dir: str, timeout_s: float, template: str | None = None
) -> dict[str, Any]:
    """A node's first task: start the node's fork server, and describe the node."""
    server = fork_server_of_node(log_dir, template)
    server.wait_ready(timeout_s)
    return {
        'name': node_name(),
        'devices': server.devices,
        'python': platform.python_version(),
        'torch': importlib.metadata.version('torch'),
    }


def node_name() -> str:
    """The node's name for people."""
    return os.environ.get('FREETRAIN_NODE') or platform.node()


def manager_pid() -> int:
    """The process id of the manager that started this worker.

    Not ``os.getppid()``: after the manager was killed, that is the id of a process that never ends,
    and a fork server owned by it would never end either.
    """
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def manager_lives() -> bool:
    """Whether the manager of this worker still runs. It need not be the worker's parent."""
    manager = multiprocessing.parent_process()
    return manager is None or manager.is_alive()


def fork_server_of_node(log_dir: str, template: str | None = None) -> ForkClient:
    """This node's fork server, started if necessary. It ends with the node's manager."""
    node = os.environ['PARSL_WORKER_POOL_ID']
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    log = str(Path(log_dir) / f'fork-server-{node}.log')
    return ForkClient.start(node, manager_pid(), log, template or template_of_node())


def start_template(log_dir: str) -> ForkClient:
    """Start the template that forks the fork servers of nodes that are processes of this computer.
    It ends with this process at the latest.
    """
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return ForkClient.start_template(
        f'template-{secrets.token_hex(8)}', os.getpid(), str(Path(log_dir) / 'template.log')
    )


class Member:
    """One node's share of a fragment."""

    def __init__(self, order: MemberOrder) -> None:
        self._order = order
        self._ranks: dict[int, RankProcess] = {}
        self._watches: dict[int, StopWatch] = {}
        self._fork_server: tuple[int, StopWatch] | None = None
        self._results: dict[int, RankResult] = {}
        self._notice = ''
        self._passed_on = ''
        self._payload = b''
        self._kill_at, self._leaves_until = float('inf'), 0.0
        self._standby: list[Channel[FromRank]] = []  # of standby ranks that do not wait yet

    def run(self, payload: bytes) -> list[RankResult]:
        """Start the ranks, and pass messages until the last one has ended. Returns how
        each ended.
        """
        order, self._payload = self._order, payload
        key = (order.fragment.trainer, order.fragment.fragment, order.member)
        for number in NOTICES:
            signal.signal(number, self._on_signal)
        control = ControlClient(order.addresses, order.port, order.cert_dir, key)
        notices = listen_for_notices()
        try:
            control.send(Hello(node_name()))
            self._launch(payload, control.address)
            self._relay(control, notices)
        finally:
            for rank in self._ranks.values():
                rank.kill()
                rank.close()
            for standby in self._standby:
                standby.close()
            control.close()
            if notices is not None:
                notices.close()
            ignore_notices()
        return [self._results[rank] for rank in sorted(self._results)]

    def _on_signal(self, number: int, _: object) -> None:
        self._notice = signal.Signals(number).name

    def _launch(self, payload: bytes, address: str) -> None:
        order = self._order
        server = fork_server_of_node(order.node_log_dir, order.template)
        server.wait_ready(_FORK_SERVER_READY_S)
        if server.pid is not None:
            self._fork_server = server.pid, StopWatch(server.pid)
        Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        count = order.fragment.per_node
        for local_rank in range(count):
            rank = order.member * count + local_rank
            log = Path(order.log_dir) / f'fragment-{order.fragment.fragment:06d}-rank-{rank}.log'
            place = RankPlace(
                rank=rank,
                world_size=order.members * count,
                local_rank=local_rank,
                nodes=order.members,
                log=str(log),
                address=address,
            )
            self._ranks[rank] = server.launch(order.fragment, place, payload, {})
            self._watches[rank] = StopWatch(self._ranks[rank].pid)
            self._results[rank] = RankResult(rank, node_name(), str(log))

    def _relay(self, control: ControlClient, notices: Channel[Notice] | None) -> None:
        poller = zmq.Poller()
        poller.register(control.socket, zmq.POLLIN)
        for process in self._ranks.values():
            poller.register(process.fileno(), zmq.POLLIN)
        running = dict(self._ranks)
        beat = time.monotonic()
        while running:
            ready = {handle for handle, _ in poller.poll(200)}
            for rank, process in list(running.items()):
                if process.fileno() in ready and not self._hear(rank, process, control):
                    poller.unregister(process.fileno())
                    del running[rank]
            while (message := control.receive()) is not None:
                self._handle(message, control)
            notices = self._look_for_notice(notices)
            self._pass_notice_on(control)
            self._look_at_standby(control)
            if time.monotonic() >= max(self._kill_at, self._leaves_until):
                for process in running.values():
                    process.kill()
            if time.monotonic() - beat >= HEARTBEAT_S:
                beat = time.monotonic()
                control.send(Alive())
                self._end_stopped(running)
            if not manager_lives():
                raise RuntimeError('The manager of this node is gone.')

    def _look_for_notice(self, notices: Channel[Notice] | None) -> Channel[Notice] | None:
        """Record what the scheduler has told the node's first process; None once that process is
        gone.
        """
        while notices is not None and notices.poll():
            try:
                notice = notices.recv()
            except EOFError:
                notices.close()
                return None
            if notice is not None:
                self._notice = notice.signal
        return notices

    def _pass_notice_on(self, control: ControlClient) -> None:
        """Pass on the scheduler's notice: ranks save at their next step boundary, and the executor
        starts nothing more on this node.
        """
        if self._notice == self._passed_on:
            return
        self._passed_on = self._notice
        logger.info('%s: asking the ranks to stop', self._notice)
        control.send(Notice(self._notice))
        self._tell(StopTraining(self._notice, node_leaves=True))

    def _tell(self, message: ToRank) -> None:
        for process in self._ranks.values():
            process.send(message)

    def _end_stopped(self, running: dict[int, RankProcess]) -> None:
        """Kill ranks that have been stopped for too long, and a stopped fork server, since all
        other ranks would wait for them.
        """
        limit_s = _STOPPED_SHARE * self._order.fragment.hang_s
        if self._fork_server is not None and self._fork_server[1].stopped_s() >= limit_s:
            logger.warning('The fork server of this node was stopped, and is killed.')
            os.kill(self._fork_server[0], signal.SIGKILL)
            self._fork_server = None
        for rank, process in running.items():
            stopped_s = self._watches[rank].stopped_s()
            if stopped_s >= limit_s:
                why = f'was stopped (SIGSTOP or SIGTSTP) for {stopped_s:.0f} s and had to be killed'
                self._results[rank] = replace(self._results[rank], killed=why)
                process.kill()

    def _hear(self, rank: int, process: RankProcess, control: ControlClient) -> bool:
        """Pass on one message of a rank; False when the rank has ended."""
        try:
            message = process.recv()
        except EOFError:
            result = self._results[rank]
            if result.outcome is None and result.status is None:
                # The fork server is gone, and the rank with it.
                control.send(RankEnded(rank, ok=False, died=True))
            return False
        result = self._results[rank]
        match message:
            case Outcome():
                self._results[rank] = result = replace(result, outcome=message)
                control.send(RankEnded(rank, result.ok))
            case Exit(status):
                self._results[rank] = replace(result, status=status)
                if result.outcome is None:
                    control.send(RankEnded(rank, ok=False, died=True))
            case LeavingState():
                self._leaves_until = time.monotonic() + LEAVING_S
            case RankPid() | Waiting() | None:
                pass
            case _:
                control.send(message)
        return True

    def _look_at_standby(self, control: ControlClient) -> None:
        """Report when all standby ranks wait."""
        if self._standby:
            for channel in [channel for channel in self._standby if channel.poll()]:
                channel.close()
                self._standby.remove(channel)
            if not self._standby:
                control.send(StandbyReady())

    def _start_standby(self, wait_s: float, control: ControlClient) -> None:
        try:
            self._standby = start_standby(self._order, self._payload, wait_s)
        except (FreeTrainError, OSError) as error:  # the next fragment starts without standby ranks
            logger.warning('No ranks run ahead of the next fragment: %s', error)
            control.send(StandbyReady())
        self._tell(NodeStays())

    def _handle(self, message: ToMember, control: ControlClient) -> None:
        match message:
            case StartStandby(wait_s):
                self._start_standby(wait_s, control)
            case AreYouThere():
                control.send(Alive())
            case Abandon(why, spare_s):
                logger.info('Told to abandon the fragment: %s', why)
                self._kill_at = time.monotonic() + spare_s
                self._leaves_until *= spare_s > 0
            case StopTraining():
                self._tell(message)
            case Rendezvous():
                for rank, process in self._ranks.items():
                    if rank != 0:  # rank 0 has sent it
                        process.send(message)
