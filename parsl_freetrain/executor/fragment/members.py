"""Messages from the executor to the members of a fragment."""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.fragment_state import RunningFragment, came_back
from parsl_freetrain.executor.fragment.member_order import MemberOrder
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.settings import Timeouts
from parsl_freetrain.training.spec import messages as msg

logger = logging.getLogger(__name__)

AHEAD_S = 30.0  # maximum seconds to wait for standby ranks before a fragment is asked to stop

# For a fragment that is asked to stop to commit its last checkpoint, and for the next to begin.
_SPARE_S = 120.0


class Members:
    """Sends messages to members, and records them in the fragment. ``peer_s``: see ``Timeouts``."""

    def __init__(
        self, control: ControlServer, parsl: ParslSide, peer_s: float = Timeouts().peer_s
    ) -> None:
        self._control, self._parsl, self._peer_s = control, parsl, peer_s

    def tell_all(self, fragment: RunningFragment, message: msg.ToMember) -> None:
        for member in fragment.members:
            self._control.send((fragment.name, fragment.number, member), message)

    def ask_to_stop(self, fragment: RunningFragment, at: float, *, followed: bool = False) -> None:
        """Ask it to save at the next step and end. ``followed``: the next ranks are ready."""
        fragment.stopping.awaited.clear()
        fragment.stopping.at, fragment.stopping.followed = at, followed
        for member in fragment.members:
            self._ask_to_stop(fragment, member)

    def _ask_to_stop(self, fragment: RunningFragment, member: int) -> None:
        # State that is left in the memory of a node that is given back would be lost.
        stop_of, leaves = fragment.stopping, fragment.leaves(member)
        stop = msg.StopTraining(stop_of.why, node_leaves=leaves, followed=stop_of.followed)
        self._control.send((fragment.name, fragment.number, member), stop)

    def give_up(self, fragment: RunningFragment, why: str, *, spare: bool = False) -> None:
        """Kill the remaining ranks; ``spare``: after they leave their states in memory."""
        if not fragment.given_up.why:
            fragment.given_up.why = why
            if spare and fragment.keeps:
                fragment.given_up.spare_s = self._peer_s + msg.LEAVING_S
            ended = fragment.ended.values()
            fragment.given_up.ended_before = frozenset(rank for ranks in ended for rank in ranks)
            self.tell_all(fragment, self._abandon(fragment))

    def in_trouble(self, fragment: RunningFragment, at: float) -> None:
        """A rank has failed. If others have lost touch with a node, it is silent: ask all."""
        if fragment.trouble_at is None:
            fragment.trouble_at = at
            self.ask(fragment, 'other ranks had lost touch with it', at)

    def ask(self, fragment: RunningFragment, why: str, at: float) -> None:
        if not fragment.unanswered():
            fragment.contact.asked_at, fragment.contact.asked_why = at, why
        self.tell_all(fragment, msg.AreYouThere())

    def catch_up(self, fragment: RunningFragment, member: int, at: float) -> None:
        """Tell a member that has just reported what the others were told before."""
        key = (fragment.name, fragment.number, member)
        if fragment.action.deadline_s is not None:
            self._control.send(key, msg.TimeLeft(max(0.0, fragment.action.deadline_s - at)))
        if fragment.given_up.why:
            self._control.send(key, self._abandon(fragment))
        elif fragment.stopping.why and not fragment.stopping.awaited:
            self._ask_to_stop(fragment, member)
        if fragment.rendezvous:
            self._control.send(key, fragment.rendezvous)

    def _abandon(self, fragment: RunningFragment) -> msg.Abandon:
        spare_s = self._peer_s if fragment.given_up.spare_s else 0.0
        return msg.Abandon(fragment.given_up.why, spare_s)

    def run_ahead(
        self,
        fragment: RunningFragment,
        nodes: Collection[str],
        order: Callable[[RunningFragment, float], MemberOrder],
    ) -> bool:
        """Start ranks where the next fragment is expected; whether to wait for them."""
        if fragment.started_at is None or fragment.outer is None:
            return False
        wait_s = AHEAD_S + _SPARE_S
        for member in fragment.members:
            if fragment.action.nodes[member] in nodes and member not in fragment.lost:
                self._control.send(
                    (fragment.name, fragment.number, member), msg.StartStandby(wait_s)
                )
                fragment.stopping.awaited.add(member)
        for node in nodes if fragment.stopping.awaited else ():
            if node not in fragment.action.nodes:
                task = member_task(node, order(fragment, wait_s), None)
                self._parsl.submit(task, fragment.task).add_done_callback(_log_failure)
        return bool(fragment.stopping.awaited)


def _log_failure(done: Future[Any]) -> None:
    """Where no rank could be started ahead, the next fragment starts as any other does."""
    if not done.cancelled() and isinstance(error := came_back(done), BaseException):
        logger.info('No ranks run ahead of the next fragment on a free node: %s', error)


def member_task(node: str, order: MemberOrder, execute: str | None) -> dict[str, Any]:
    """What has Parsl run a member on a node; ``execute``: the task's own hook, if any."""
    f = 'parsl_freetrain.executor.fragment.worker_tasks.run_member'
    return {'resource_spec': {PIN: node}, 'task_executor': {'f': f, 'a': (order, execute)}}
