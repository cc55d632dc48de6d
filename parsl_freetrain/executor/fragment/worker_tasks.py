"""The tasks of a Parsl worker on a node: its greeting, and its share of a fragment."""

import pkgutil
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from parsl.executors.execute_task import execute_task

from parsl_freetrain.executor.fragment import node_fork_server
from parsl_freetrain.executor.fragment.member import Member
from parsl_freetrain.executor.fragment.member_order import MemberOrder, RankResult
from parsl_freetrain.training.process.node_agent import heed_notices, ignore_notices
from parsl_freetrain.training.process.node_agent import leave as end_node

_order: ContextVar[MemberOrder] = ContextVar('member_order')


def fragment_task(
    payload: bytes, checkpoint: Any = None, parsl_resource_specification: Any = None
) -> list[RankResult]:
    """A fragment's Parsl task on one node: a result for each of its ranks."""
    order = _order.get()
    if order.ahead_s is not None:
        node_fork_server.start_standby(order, payload, order.ahead_s)
        return []
    return Member(order).run(payload)


def run_member(buffer: bytes, order: MemberOrder, execute: str | None = None) -> Any:
    """Parsl's ``task_executor`` hook for fragments; ``execute``: the hook set before, if any."""
    _order.set(order)
    ignore_notices()
    return _executing(execute)(buffer)


def run_ordinary(buffer: bytes, execute: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Parsl's hook for other tasks (``execute``: the one before); SIGTERM ends their processes."""
    heed_notices()
    return _executing(execute)(buffer, *args, **kwargs)


def _executing(execute: str | None) -> Callable[..., Any]:
    return pkgutil.resolve_name(execute) if execute else execute_task


class Greeting(NamedTuple):
    name: str
    devices: int
    clock: float = 0.0


def greet(buffer: bytes, log_dir: str, timeout_s: float, template: str | None = None) -> Greeting:
    """A node's first task: start the node's fork server, and describe the node."""
    clock, server = time.time(), node_fork_server.fork_server_of_node(log_dir, template)
    server.wait_ready(timeout_s)
    return Greeting(node_fork_server.node_name(), server.devices, clock)


def leave(buffer: bytes) -> None:
    """A node's last task: end the node, whose block is given back or taken."""
    end_node()
