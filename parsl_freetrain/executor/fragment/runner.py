"""Runs fragments: sends one member to each node, stops them, and determines their results."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import structs

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput, TrainerFailed, nodes_text
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.fragment.control_channel import ControlServer, MemberDisconnected
from parsl_freetrain.executor.fragment.fragment_parts import Stopping
from parsl_freetrain.executor.fragment.fragment_state import (
    FragmentResult,
    RunningFragment,
    came_back,
)
from parsl_freetrain.executor.fragment.listener import Listener
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint, MemberOrder
from parsl_freetrain.executor.fragment.members import Members, member_task
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord, furthest
from parsl_freetrain.executor.fragment.watchdog import LOOK_S, GiveUp, NodeSilent, StopNow, Watchdog
from parsl_freetrain.executor.off_loop import in_thread
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.settings import Timeouts
from parsl_freetrain.executor.stream import Stream, Subscriber
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import Abandon, Alive, FromMember, Hello
from parsl_freetrain.training.spec.mode import Reproducible

logger = logging.getLogger(__name__)

SETTLED_S = 0.5  # maximum seconds in which Parsl takes note of a fragment's end
FRAGMENT = 'freetrain_fragment'  # key of the resource specification that marks a fragment's task


class MemberReturned(NamedTuple):
    trainer: str
    fragment: int
    member: int
    done: Future[Any]


class FragmentRunner(Subscriber):
    """Carries out the controller's actions on fragments, and emits the results."""

    def __init__(
        self,
        control: ControlServer,
        stream: Stream,
        endpoint: ControlEndpoint,
        timeouts: Timeouts,
        parsl: ParslSide,
        records: dict[str, TrainerRecord] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._control, self._stream, self._endpoint = clock, control, stream, endpoint
        self._timeouts, self._parsl = timeouts, parsl
        self._members = Members(control, parsl, timeouts.peer_s)
        self._listener = Listener(self._members, stream)
        self._watchdog = Watchdog(timeouts)
        self.running: dict[tuple[str, int], RunningFragment] = {}
        self.records = {} if records is None else records
        # Results of fragments that ended before Parsl passed on their tasks.
        self._early: dict[tuple[str, int], FragmentResult] = {}
        self._silent: dict[str, str] = {}  # nodes that were given up, with reasons
        self._faulty: dict[str, str] = {}  # nodes with a broken device, with reasons
        self._devices: dict[str, int] = {}  # accelerators of each node

    def start(self, action: ev.StartFragment, at: float) -> None:
        """Submit the fragment's Parsl task; it comes back through :meth:`arrived`."""
        record = self.records[action.trainer]
        nodes, begins_with = action.nodes, record.resume(action.nodes)
        name, number = action.trainer, action.fragment
        ranks = record.ranks_on([self._devices.get(node, 0) for node in nodes])
        samples = begins_with.handover.samples if begins_with else 0
        fragment = RunningFragment(action, at, record.checkpoint, ranks_per_node=ranks)
        fragment.reached = max(record.checkpoint.samples, samples)
        fragment.begins_with = begins_with
        self.running[name, number] = fragment
        task: Future[Checkpoint] | None = None
        try:
            newest = record.last_good or record.checkpoint
            task = record.task = record.launch({FRAGMENT: f'{name}/{number}'}, newest)
        except Exception as error:
            logger.exception('Fragment %s of %s could not be submitted', number, name)
            fragment.given_up.why = f'it could not be submitted: {error}'
        task_id = (getattr(task, 'task_record', None) or {}).get('id')
        what = nodes, action.deadline_s, action.samples, action.shape, task_id
        self._stream.emit(ev.FragmentLaunched(at, name, number, *what, failed=task is None))
        if task is None:
            self._conclude(fragment, at)
            self._early.pop((name, number), None)  # Parsl will not send it

    def arrived(self, context: Mapping[str, Any], buffer: bytes, outer: Future[Checkpoint]) -> None:
        """Handle a fragment's task from Parsl: send one copy to each of the fragment's nodes."""
        name, _, digits = context['resource_spec'][FRAGMENT].rpartition('/')
        number = int(digits)
        fragment = self.running.get((name, number))
        if fragment is None:
            unknown = f'Fragment {number} of trainer {name!r} is not known here.'
            _resolve(outer, self._early.pop((name, number), None), unknown)
            return
        fragment.outer, fragment.task, fragment.sent_at = outer, buffer, self._clock()
        earlier = context.get('task_executor', {}).get('f')
        for member in fragment.members:
            if member in fragment.lost:
                continue
            order = self._order(fragment, member)
            task = member_task(fragment.action.nodes[member], order, earlier)
            self._parsl.submit(task, buffer).add_done_callback(
                lambda done, member=member: self._control.post(  # type: ignore[misc]
                    MemberReturned(name, number, member, done)
                )
            )

    def _order(self, fragment: RunningFragment, member: int) -> MemberOrder:
        record, action = self.records[fragment.name], fragment.action
        spec, at = record.spec.with_ranks(fragment.ranks_per_node), self._clock()
        shapes = spec.shapes.get(len(fragment.members))
        changed = record.changed_at and record.changed_at == fragment.checkpoint.path
        if changed and isinstance(spec.mode, Reproducible):
            # Its first step need not be the one that the checkpoint foresaw.
            spec = structs.replace(spec, mode=structs.replace(spec.mode, on_difference='warn'))
        order = FragmentOrder(
            trainer=fragment.name,
            fragment=fragment.number,
            store=record.store,
            spec=spec,
            speeds=action.speeds,
            interruptions_per_s=action.interruptions_per_s,
            shape=shapes[action.shape] if shapes else None,
            interface=self._endpoint.interface,
            hang_s=self._timeouts.hang_s,
            handover=fragment.begins_with.handover if fragment.begins_with is not None else None,
            samples=fragment.checkpoint.samples,
            handed_in=tuple((*of, told) for of, told in dict(record.handed_in).items()),
        )
        return MemberOrder(
            *(order, member, len(fragment.members), self._endpoint, f'{record.store}/logs'),
            left_s=None if action.deadline_s is None else action.deadline_s - at,
            exempt_s=None if action.exempt_until_s is None else action.exempt_until_s - at,
        )

    def heard(self, said: FromMember, at: float) -> None:
        fragment = self.running.get((said.trainer, said.fragment))
        if fragment is not None:
            self._listener.heard(said, fragment, self.records[fragment.name], at)
            return
        # A task that came late, or ranks of a node that was lost: they would hold the node up.
        if isinstance(said.message, Hello | Alive):
            self._control.send(said.sender, Abandon('its fragment is over'))
        self._control.forget(said.trainer, said.fragment)

    def stop(self, action: ev.StopFragment, at: float) -> None:
        """Ask a fragment to save and end, once the next ranks (if any) are ready."""
        fragment = self.running.get((action.trainer, action.fragment))
        if fragment is None or fragment.stopping.why:
            return  # a rehearsed preemption does not wait for the next fragment
        goes_on, leaving = bool(action.then), frozenset(action.leaving)
        fragment.stopping = Stopping(action.why, at, goes_on=goes_on, leaving=leaving)
        if not self._members.run_ahead(
            fragment,
            action.then,
            lambda fragment, wait_s: replace(self._order(fragment, 0), ahead_s=wait_s),
        ):
            self._members.ask_to_stop(fragment, at)

    def hurry(self, at: float) -> None:
        """Stop all fragments that wait for the next ranks; they commit their states themselves."""
        for fragment in self.running.values():
            if fragment.stopping.awaited or fragment.stopping.followed:
                self._members.ask_to_stop(fragment, at)

    def rehearse(self, name: str, grace_s: float, at: float) -> str:
        """Stop a fragment as a preemption with notice would; a sentence, or BadInput."""
        going = (f for f in self.running.values() if f.name == name and not f.given_up.why)
        fragment = next(going, None)
        if fragment is None:
            raise BadInput(f'No fragment of trainer {name!r} is running now.')
        nodes = nodes_text(len(fragment.members))
        which = f'Fragment {fragment.number} of trainer {name!r} on {nodes}'
        if grace_s <= 0:
            self._members.give_up(fragment, 'a rehearsed preemption')
            return f'{which} is being killed.'
        fragment.stopping.why = fragment.stopping.why or 'a rehearsed preemption'
        fragment.stopping.grace_s = grace_s
        self._members.ask_to_stop(fragment, at)
        return f'{which} has its notice, and is killed if it is still there in {grace_s:g} s.'

    def abandon(self, action: ev.AbandonFragment) -> None:
        fragment = self.running.get((action.trainer, action.fragment))
        if fragment is not None:
            self._members.give_up(fragment, 'some of its nodes are gone', spare=True)

    def node_of(self, name: str, number: int, member: int) -> str | None:
        fragment = self.running.get((name, number))
        return fragment.action.nodes[member] if fragment else None

    def take(self, event: ev.Event) -> None:
        if isinstance(event, ev.NodesJoined):
            self._devices.update(zip(event.nodes, event.devices, strict=False))
        if isinstance(event, ev.NodesLeft):
            for fragment in list(self.running.values()):
                fragment.lose(set(event.nodes), self._silent)
                if event.how == ev.OUT_OF_MEMORY:
                    for node in event.nodes:
                        fragment.job_out_of_memory(node)
                if fragment.over():
                    self._conclude(fragment, event.at)

    def returned(self, back: MemberReturned, at: float) -> None:
        fragment = self.running.get((back.trainer, back.fragment))
        if fragment is None:
            return
        came = fragment.settled[back.member] = came_back(back.done)
        if isinstance(came, BaseException) or not all(result.ok for result in came):
            self._members.in_trouble(fragment, at)
        if fragment.over():
            self._conclude(fragment, at)

    def _conclude(self, fragment: RunningFragment, at: float) -> None:
        record = self.records[fragment.name]
        result = fragment.result(record.device_faults)
        name, number = fragment.name, fragment.number
        self._stream.emit(*([fragment.unrecorded] if fragment.unrecorded else []))
        del self.running[name, number]
        self._control.forget(name, number)
        faults = fragment.device_faults()
        record.fragment_ended(result, faults.values())
        if result.ending is not ev.Ending.FAILED:
            self._faulty |= {node: rank.fault for node, rank in faults.items()}
        record.pause(fragment, result)
        kept = max([result.checkpoint.samples, *(left.handover.samples for left in record.left)])
        reached = max(furthest(fragment), kept)
        started_at, last = fragment.started_at, fragment.outcome()
        start_s = None if started_at is None else started_at - fragment.decided_at
        step_s = (last and last.step_s) or None
        checkpoint_s = (last and last.checkpoint_s) or None
        how = result.ending, result.error, result.out_of_memory, result.checkpoint.samples, reached
        memory, final, storage = fragment.memory(), result.final, result.storage
        ended = ev.FragmentEnded(
            at, name, number, kept, *how, start_s, step_s, checkpoint_s, memory, final, storage
        )
        self._stream.emit(ended)
        if fragment.outer is not None:
            _resolve(fragment.outer, result, '')
            if record.task is not None and result.ending is not ev.Ending.FAILED:
                # The next fragment waits for it, but not for the user's callbacks.
                wait([record.task], SETTLED_S)
        else:
            self._early[name, number] = result

    def look(self, at: float) -> set[str]:
        """Give up fragments that exceed a time limit; returns nodes that do not answer at all."""
        silent: dict[str, str] = {}
        for fragment in list(self.running.values()):
            if fragment.given_up.why and fragment.outer is None:
                self._conclude(fragment, at)  # Parsl has not passed its task on, and may never
        for found in self._watchdog.look(self.running.values(), at):
            match found:
                case GiveUp(fragment, why):
                    self._members.give_up(fragment, why)
                case StopNow(fragment):
                    self._members.ask_to_stop(fragment, at)
                case NodeSilent(node, why):
                    logger.info('Node %s is given up: %s', node, why)  # nodes leave all the time
                    silent[node] = why
        self._silent |= silent
        return set(silent)

    def look_within_s(self) -> float:
        """Maximum seconds until :meth:`look` is to be called again."""
        return self._watchdog.within_s(self.running.values())

    def disconnected(self, gone: MemberDisconnected, at: float) -> bool:
        """A connection has ended: ask all members whether they live, unless its ranks had ended."""
        fragment = self.running.get((gone.trainer, gone.fragment))
        if fragment is None or fragment.ranks_ended(gone.member):
            return False
        if gone.member in fragment.contact.heard:  # what it has said before is no answer
            heard = fragment.contact.heard
            heard[gone.member] = min(heard[gone.member], at - LOOK_S)
        fragment.contact.disconnected.add(gone.member)
        self._members.ask(fragment, 'its connection had ended', at)
        return True

    def faulty(self) -> dict[str, str]:
        """Nodes on which a device has failed since the last call, with reasons."""
        found, self._faulty = self._faulty, {}
        return found

    def end(self, why: str) -> None:
        """End the running fragments for Parsl, since no more messages will arrive."""
        for fragment in self.running.values():
            if fragment.outer is not None and not fragment.outer.done():
                said = f'Fragment {fragment.number} of {fragment.name!r} ended: {why}.'
                _resolve(fragment.outer, None, said)


def _resolve(outer: Future[Checkpoint], result: FragmentResult | None, why: str) -> None:
    """Settle Parsl's future in a thread: callbacks are the user's. A preemption is no failure."""

    def settle() -> None:
        if result is None:
            outer.set_exception(TrainerFailed(why))
        elif result.ending is ev.Ending.FAILED and result.exception is not None:
            outer.set_exception(result.exception())
        else:
            outer.set_result(result.checkpoint)

    in_thread(settle, 'FreeTrain-Fragment')
