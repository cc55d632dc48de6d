"""What a Parsl worker runs on a node: the node's greeting, and its share of a fragment's ranks.

The worker itself never imports torch. It asks the node's warm parent for ranks, passes messages
between them and the executor, and ends them when the executor, the manager or its own orders say so.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from parsl.executors.execute_task import execute_task

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.executor.control import ControlClient, Message
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.liveness import StopWatch
from parsl_freetrain.training.node import NOTICES, heed_notices, ignore_notices, listen_for_notices
from parsl_freetrain.training.warm import RankProcess, WarmParent

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_WARM_S = 120.0
_STOPPED_SHARE = 0.5    # of the patience with a rank that hangs; the rest is for the end of the others


@dataclass(frozen=True)
class MemberOrder:
    """What one node is told about its part of a fragment.

    Attributes
    ----------
    fragment
        The order for the ranks.
    member, members
        This node's index and the number of nodes; it runs ranks ``member * fragment.ranks_per_node``
        and following.
    addresses, port, cert_dir
        Where the executor's control channel is.
    log_dir
        Folder for the ranks' output.
    template
        Name of the warm parent of this computer that forks the nodes' ones; None: there is none.
    ahead_s
        Not a part of this fragment, but ranks that run ahead of the next one, and wait for it so many seconds at most; None: a part of it.
    """

    fragment: FragmentOrder
    member: int
    members: int
    addresses: list[str]
    port: int
    cert_dir: str | None
    log_dir: str
    template: str | None = None
    ahead_s: float | None = None


_order: ContextVar[MemberOrder] = ContextVar('member_order')


def fragment_task(payload: bytes, checkpoint: Any = None, parsl_resource_specification: Any = None) -> list[Message]:
    """The Parsl task of a fragment, as each of its nodes runs it.

    Parameters
    ----------
    payload
        The user's function and its arguments, by cloudpickle.
    checkpoint
        The previous fragment's checkpoint; it makes the chain visible to Parsl. The ranks find the newest good one themselves.

    Returns
    -------
    list of dict
        The last message of each of this node's ranks.
    """
    order = _order.get()
    if order.ahead_s is not None:
        run_ahead(order, payload, order.ahead_s)
        return []
    return Member(order).run(payload)


def run_member(buffer: bytes, order: MemberOrder, execute: str | None = None) -> Any:
    """Parsl's ``task_executor`` hook: run the task as ``order`` says (``execute``: the hook that was set before, if any)."""
    _order.set(order)
    ignore_notices()
    return _executing(execute)(buffer)


def run_ordinary(buffer: bytes, execute: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Parsl's ``task_executor`` hook for all other tasks: what they start must end on SIGTERM, as programs expect of each other.

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


def run_ahead(order: MemberOrder, payload: bytes, wait_s: float) -> list[Channel]:
    """Start this node's ranks of the next fragment; each channel can be read when its rank has come as far as it can."""
    warm = warm_parent(str(Path(order.log_dir).parent), order.template)
    warm.wait_ready(_WARM_S)
    Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    logs = [str(Path(order.log_dir) / f'ahead-of-{order.fragment.fragment:06d}-{os.environ["PARSL_WORKER_POOL_ID"]}-{i}.log')
            for i in range(order.fragment.ranks_per_node)]
    return [warm.run_ahead(order.fragment, i, payload, {}, log, wait_s) for i, log in enumerate(logs)]


def greet(buffer: bytes, log_dir: str, warm_timeout_s: float, template: str | None = None) -> dict[str, Any]:
    """Warm a node up and tell what it is; the first task that each node gets."""
    warm_parent(log_dir, template).wait_ready(warm_timeout_s)
    return {
        'name': node_name(),
        'python': platform.python_version(),
        'torch': importlib.metadata.version('torch'),
    }


def node_name() -> str:
    """What people call this node."""
    return os.environ.get('FREETRAIN_NODE') or platform.node()


def manager_pid() -> int:
    """The process id of the manager that started this worker.

    Once the manager has been killed, ``os.getppid()`` is that of a process that never ends, and so would be a warm parent that it owned.
    """
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def warm_parent(log_dir: str, template: str | None = None) -> WarmParent:
    """This node's warm parent, started if need be; it lives as long as the node's manager."""
    node = os.environ['PARSL_WORKER_POOL_ID']
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return WarmParent.start(node, manager_pid(), str(Path(log_dir) / f'warm-{node}.log'), template)


def start_template(log_dir: str) -> WarmParent:
    """Start what forks the warm parents of nodes that are processes of this computer; it ends with this process at the latest."""
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return WarmParent.start_template(f'template-{secrets.token_hex(8)}', os.getpid(), str(Path(log_dir) / 'warm-template.log'))


class Member:
    """One node's share of a fragment."""

    def __init__(self, order: MemberOrder) -> None:
        self._order = order
        self._manager = manager_pid()
        self._ranks: dict[int, RankProcess] = {}
        self._watches: dict[int, StopWatch] = {}
        self._warm: tuple[int, StopWatch] | None = None
        self._last: dict[int, Message] = {}
        self._notice = ''
        self._passed_on = ''
        self._payload = b''
        self._ahead: list[Channel] = []   # of ranks of the next fragment that have not come far enough yet

    def run(self, payload: bytes) -> list[Message]:
        """Start the ranks, pass messages until the last has ended, and return what each said last."""
        order, self._payload = self._order, payload
        key = (order.fragment.trainer, order.fragment.fragment, order.member)
        for number in NOTICES:
            signal.signal(number, self._on_signal)
        control = ControlClient(order.addresses, order.port, order.cert_dir, key)
        notices = listen_for_notices()
        try:
            control.send({'kind': 'member', 'node': node_name()})
            self._launch(payload)
            self._relay(control, notices)
        finally:
            for rank in self._ranks.values():
                rank.kill()
                rank.close()
            for ahead in self._ahead:
                ahead.close()
            control.close()
            if notices is not None:
                notices.close()
            ignore_notices()
        return [self._last[rank] for rank in sorted(self._last)]

    def _on_signal(self, number: int, _: object) -> None:
        self._notice = signal.Signals(number).name

    def _launch(self, payload: bytes) -> None:
        order = self._order
        warm = warm_parent(str(Path(order.log_dir).parent), order.template)
        warm.wait_ready(_WARM_S)
        if warm.pid is not None:
            self._warm = warm.pid, StopWatch(warm.pid)
        Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        count = order.fragment.ranks_per_node
        for local_rank in range(count):
            rank = order.member * count + local_rank
            log = Path(order.log_dir) / f'fragment-{order.fragment.fragment:06d}-rank-{rank}.log'
            place = RankPlace(rank=rank, world_size=order.members * count, local_rank=local_rank,
                              nodes=order.members, log=str(log))
            self._ranks[rank] = warm.launch(order.fragment, place, payload, {})
            self._watches[rank] = StopWatch(self._ranks[rank].pid)
            self._last[rank] = {'kind': 'outcome', 'rank': rank, 'how': 'died', 'log': str(log), 'node': node_name()}

    def _relay(self, control: ControlClient, notices: Channel | None) -> None:
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
                self._obey(message, control)
            notices = self._look_for_notice(notices)
            self._pass_notice_on(control)
            self._look_ahead(control)
            if time.monotonic() - beat >= HEARTBEAT_S:
                beat = time.monotonic()
                control.send({'kind': 'alive'})
                self._end_stopped(running)
            if os.getppid() != self._manager:
                raise RuntimeError('The manager of this node is gone.')

    def _look_for_notice(self, notices: Channel | None) -> Channel | None:
        """Note what the scheduler has told the node's first process; None once that is gone."""
        while notices is not None and notices.poll():
            try:
                self._notice = str(notices.recv()['signal'])
            except EOFError:
                notices.close()
                return None
        return notices

    def _pass_notice_on(self, control: ControlClient) -> None:
        """The scheduler wants the node: ranks save at their next step boundary, and the executor starts nothing more here."""
        if self._notice == self._passed_on:
            return
        self._passed_on = self._notice
        logger.info('%s: asking the ranks to stop', self._notice)
        control.send({'kind': 'notice', 'signal': self._notice})
        for process in self._ranks.values():
            process.send({'kind': 'stop', 'why': self._notice, 'leaves': True})

    def _end_stopped(self, running: dict[int, RankProcess]) -> None:
        """Kill ranks that have been stopped for too long: they would keep all others waiting. So would a warm parent."""
        limit_s = _STOPPED_SHARE * self._order.fragment.hang_s
        if self._warm is not None and self._warm[1].stopped_s() >= limit_s:
            logger.warning('The warm parent of this node was stopped, and is killed with its ranks.')
            os.kill(self._warm[0], signal.SIGKILL)
            self._warm = None
        for rank, process in running.items():
            stopped_s = self._watches[rank].stopped_s()
            if stopped_s >= limit_s:
                if self._last[rank]['how'] == 'died':   # it has not had its last word
                    why = f'was stopped (SIGSTOP or SIGTSTP) for {stopped_s:.0f} s and had to be killed'
                    self._last[rank] |= {'how': 'hung', 'why': why}
                process.kill()

    def _hear(self, rank: int, process: RankProcess, control: ControlClient) -> bool:
        """Pass on one message of a rank; False when it has ended."""
        try:
            message = process.recv()
        except EOFError:
            if self._last[rank]['how'] in ('died', 'hung') and 'status' not in self._last[rank]:
                # The warm parent is gone, and the rank with it.
                control.send({'kind': 'rank-ended', 'rank': rank, 'how': self._last[rank]['how']})
            return False
        kind = message['kind']
        if kind == 'outcome':
            self._last[rank] = {**message, 'rank': rank, 'log': self._last[rank]['log'], 'node': self._last[rank]['node']}
            control.send({'kind': 'rank-ended', 'rank': rank, 'how': message['how']})
        elif kind == 'exit':
            self._last[rank]['status'] = message['status']
            if self._last[rank]['how'] in ('died', 'hung'):
                control.send({'kind': 'rank-ended', 'rank': rank, 'how': self._last[rank]['how']})
        elif kind != 'pid':
            control.send({**message, 'rank': rank})
        return True

    def _look_ahead(self, control: ControlClient) -> None:
        """Say when all ranks of the next fragment have come as far as they can."""
        if self._ahead:
            for channel in [channel for channel in self._ahead if channel.poll()]:
                channel.close()
                self._ahead.remove(channel)
            if not self._ahead:
                control.send({'kind': 'ahead'})

    def _run_ahead(self, wait_s: float, control: ControlClient) -> None:
        try:
            self._ahead = run_ahead(self._order, self._payload, wait_s)
        except (FreeTrainError, OSError) as error:   # the next fragment starts as any other then
            logger.warning('No ranks run ahead of the next fragment: %s', error)
            control.send({'kind': 'ahead'})
        for process in self._ranks.values():
            process.send({'kind': 'hand-over'})

    def _obey(self, message: Message, control: ControlClient) -> None:
        if message['kind'] == 'run-ahead':
            self._run_ahead(message['wait_s'], control)
            return
        if message['kind'] == 'abandon':
            logger.info('Told to abandon the fragment: %s', message.get('why'))
            for process in self._ranks.values():
                process.kill()
            return
        for rank, process in self._ranks.items():
            if message['kind'] == 'rendezvous' and rank == 0:
                continue
            process.send(message)
