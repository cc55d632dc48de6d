"""A node's fork server and standby ranks, as its Parsl workers (without torch) use and own them."""

import multiprocessing
import os
import platform
import secrets
from contextlib import suppress
from pathlib import Path

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.executor.fragment.member_order import MemberOrder
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.node_agent import template_of_node
from parsl_freetrain.training.spec.messages import FromRank

FORK_SERVER_READY_S = 120.0


def node_name() -> str:
    return os.environ.get('FREETRAIN_NODE') or platform.node()


def manager_pid() -> int:
    """This worker's manager, also after it was killed, unlike ``os.getppid()``."""
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
    """Start the template that forks the nodes' fork servers here; it ends with this process. If
    this process was started with a template, as on a node, that one forks it.
    """
    Path(log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    own = f'template-{secrets.token_hex(8)}', os.getpid(), str(Path(log_dir) / 'template.log')
    if (here := template_of_node()) is None:
        return ForkClient.start_template(*own)
    forked = ForkClient.start(*own, here)
    with suppress(FreeTrainError):  # without it, fork servers import torch themselves
        forked.wait_ready(FORK_SERVER_READY_S)
    return forked


def start_standby(order: MemberOrder, payload: bytes, wait_s: float) -> list[Channel[FromRank]]:
    """Start this node's ranks for the next fragment: channels, readable once their rank waits."""
    server = fork_server_of_node(order.endpoint.node_log_dir, order.endpoint.template)
    server.wait_ready(FORK_SERVER_READY_S)
    Path(order.log_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = f'ahead-of-{order.fragment.fragment:06d}-{os.environ["PARSL_WORKER_POOL_ID"]}'
    names = (f'{stem}-{i}.log' for i in range(order.fragment.per_node))
    logs = [str(Path(order.log_dir) / name) for name in names]
    return [
        server.start_standby(order.fragment, i, payload, {}, log, wait_s)
        for i, log in enumerate(logs)
    ]
