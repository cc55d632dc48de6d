"""A trainer's next ranks are started before the fragment that trains is asked to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.fragment_state import RunningFragment, came_back
from parsl_freetrain.executor.fragment.member_order import MemberOrder
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.training.spec.messages import StartStandby

logger = logging.getLogger(__name__)

AHEAD_S = 30.0
"""Maximum seconds to wait for standby ranks before a fragment is asked to stop."""

# For a fragment that is asked to stop to commit its last checkpoint, and for the next to begin.
_SPARE_S = 120.0


class StandbyLauncher:
    """Has ranks run ahead, and says when the fragment that trains may be asked to stop."""

    def __init__(self, control: ControlServer, parsl: ParslSide) -> None:
        self._control, self._parsl = control, parsl

    def send(
        self,
        fragment: RunningFragment,
        nodes: Collection[str],
        order: Callable[[RunningFragment, float], MemberOrder],
    ) -> bool:
        """Start ranks on the nodes where the next fragment is expected; whether to wait for them.

        A member of the fragment starts those on its own node. Other nodes are free, and run a task
        for it that does not wait for the ranks, which take as long to start as the members' own.
        ``order`` makes the order for such a node, with the ranks' patience in seconds.
        """
        if fragment.started_at is None or fragment.outer is None:
            return False
        wait_s = AHEAD_S + _SPARE_S
        for member in fragment.members:
            if fragment.action.nodes[member] in nodes and member not in fragment.lost:
                self._control.send((fragment.name, fragment.number, member), StartStandby(wait_s))
                fragment.stopping.awaited.add(member)
        for node in (
            [node for node in nodes if node not in fragment.action.nodes]
            if fragment.stopping.awaited
            else ()
        ):
            self._parsl.submit(
                {
                    'resource_spec': {PIN: node},
                    'task_executor': {
                        'f': 'parsl_freetrain.executor.fragment.worker_tasks.run_member',
                        'a': (order(fragment, wait_s), None),
                    },
                },
                fragment.task,
            ).add_done_callback(_log_failure)
        return bool(fragment.stopping.awaited)


def _log_failure(done: Future[Any]) -> None:
    """Where no rank could be started ahead, the next fragment starts as any other does."""
    if not done.cancelled() and isinstance(error := came_back(done), BaseException):
        logger.warning('No ranks run ahead of the next fragment on a free node: %s', error)


def overdue(fragment: RunningFragment, at: float) -> bool:
    """Whether a fragment has been kept training for those that run ahead for long enough."""
    return bool(fragment.stopping.awaited) and at - fragment.stopping.at > AHEAD_S
