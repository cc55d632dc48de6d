"""What a Parsl worker runs on a node: the node's greeting, and its share of a fragment's ranks.

The worker itself never imports torch. It asks the node's warm parent for ranks, passes messages
between them and the executor, and ends them when the executor, the manager or its own orders say so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from parsl.executors.execute_task import execute_task

from parsl_freetrain.executor.control import ControlClient, Message
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.warm import RankProcess, WarmParent

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class MemberOrder:
    """What one node is told about its part of a fragment.

    Attributes
    ----------
    fragment
        The order for the ranks.
    member, members
        This node's index and the number of nodes; it runs ranks ``member * ranks_per_node`` and following.
    addresses, port, cert_dir
        Where the executor's control channel is.
    log_dir
        Folder for the ranks' output.
    template
        Name of the warm parent of this computer that forks the nodes' ones; None: there is none.
    """

    fragment: FragmentOrder
    member: int
    members: int
    ranks_per_node: int
    addresses: list[str]
    port: int
    cert_dir: str | None
    log_dir: str
    template: str | None = None


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
    return Member(_order.get()).run(payload)


def run_member(buffer: bytes, order: MemberOrder, execute: str | None = None) -> Any:
    """Parsl's ``task_executor`` hook: run the task as ``order`` says (``execute``: the hook that was set before, if any)."""
    _order.set(order)
    run: Callable[[bytes], Any] = execute_task
    if execute:
        module, _, name = execute.rpartition('.')
        run = getattr(importlib.import_module(module), name)
    return run(buffer)


def greet(buffer: bytes, log_dir: str, warm_timeout_s: float, template: str | None = None) -> dict[str, Any]:
    """Warm a node up and tell what it is; the first task that each node gets."""
    warm_parent(log_dir, template).wait_ready(warm_timeout_s)
    return {
        'name': os.environ.get('FREETRAIN_NODE') or platform.node(),
        'python': platform.python_version(),
        'torch': importlib.metadata.version('torch'),
    }


def warm_parent(log_dir: str, template: str | None = None) -> WarmParent:
    """This node's warm parent, started if need be; it lives as long as the node's manager."""
    node = os.environ['PARSL_WORKER_POOL_ID']
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return WarmParent.start(node, os.getppid(), str(Path(log_dir) / f'warm-{node}.log'), template)


def start_template(log_dir: str) -> WarmParent:
    """Start what forks the warm parents of nodes that are processes of this computer; it ends with this process at the latest."""
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    return WarmParent.start_template(f'template-{secrets.token_hex(8)}', os.getpid(), str(Path(log_dir) / 'warm-template.log'))


class Member:
    """One node's share of a fragment."""

    def __init__(self, order: MemberOrder) -> None:
        self._order = order
        self._manager = os.getppid()
        self._ranks: dict[int, RankProcess] = {}
        self._last: dict[int, Message] = {}

    def run(self, payload: bytes) -> list[Message]:
        """Start the ranks, pass messages until the last has ended, and return what each said last."""
        order = self._order
        key = (order.fragment.trainer, order.fragment.fragment, order.member)
        control = ControlClient(order.addresses, order.port, order.cert_dir, key)
        try:
            control.send({'kind': 'member'})
            self._launch(payload)
            self._relay(control)
        finally:
            for rank in self._ranks.values():
                rank.kill()
                rank.close()
            control.close()
        return [self._last[rank] for rank in sorted(self._last)]

    def _launch(self, payload: bytes) -> None:
        order = self._order
        warm = warm_parent(str(Path(order.log_dir).parent), order.template)
        warm.wait_ready(120)
        Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        for local_rank in range(order.ranks_per_node):
            rank = order.member * order.ranks_per_node + local_rank
            log = Path(order.log_dir) / f'fragment-{order.fragment.fragment:06d}-rank-{rank}.log'
            place = RankPlace(rank=rank, world_size=order.members * order.ranks_per_node, local_rank=local_rank,
                              nodes=order.members, log=str(log))
            self._ranks[rank] = warm.launch(order.fragment, place, payload, {})
            self._last[rank] = {'kind': 'outcome', 'rank': rank, 'how': 'died', 'log': str(log)}

    def _relay(self, control: ControlClient) -> None:
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
                self._obey(message)
            if time.monotonic() - beat >= HEARTBEAT_S:
                beat = time.monotonic()
                control.send({'kind': 'alive'})
            if os.getppid() != self._manager:
                raise RuntimeError('The manager of this node is gone.')

    def _hear(self, rank: int, process: RankProcess, control: ControlClient) -> bool:
        """Pass on one message of a rank; False when it has ended."""
        try:
            message = process.recv()
        except EOFError:
            return False
        kind = message['kind']
        if kind == 'outcome':
            self._last[rank] = {**message, 'rank': rank, 'log': self._last[rank]['log']}
            control.send({'kind': 'rank-ended', 'rank': rank, 'how': message['how']})
        elif kind == 'exit':
            self._last[rank]['status'] = message['status']
            if self._last[rank]['how'] == 'died':
                control.send({'kind': 'rank-ended', 'rank': rank, 'how': 'died'})
        elif kind != 'pid':
            control.send({**message, 'rank': rank})
        return True

    def _obey(self, message: Message) -> None:
        if message['kind'] == 'abandon':
            logger.info('Told to abandon the fragment: %s', message.get('why'))
            for process in self._ranks.values():
                process.kill()
            return
        for rank, process in self._ranks.items():
            if message['kind'] == 'rendezvous' and rank == 0:
                continue
            process.send(message)
