"""A node's first task and its last, as the interchange gets them."""

from __future__ import annotations

from typing import Any

from parsl_freetrain.executor.interchange import PIN

_GREETING_S = 120.0


def greeting(manager: str, node_log_dir: str, template: str | None) -> dict[str, Any]:
    """Starts the node's fork server, and describes the node."""
    return _task(manager, 'greet', node_log_dir, _GREETING_S, template)


def leaving(manager: str) -> dict[str, Any]:
    """Ends the node."""
    return _task(manager, 'leave')


def _task(manager: str, function: str, *arguments: Any) -> dict[str, Any]:
    hook = {'f': f'parsl_freetrain.executor.fragment.worker_tasks.{function}', 'a': arguments}
    return {'resource_spec': {PIN: manager}, 'task_executor': hook}
