"""Fragments on their nodes: fanned out to one member per node, listened to, stopped, and brought to a verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.events import Ending
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.executor.ahead import Forerunners, overdue
from parsl_freetrain.executor.control import ControlServer, Message
from parsl_freetrain.executor.gang import Gang, Verdict, came_back
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.member import MemberOrder
from parsl_freetrain.executor.trainers import TrainerRecord
from parsl_freetrain.ledger.store import Ledger
from parsl_freetrain.training.fragment import FragmentOrder

logger = logging.getLogger(__name__)

LOOK_S = 1.0   # between two looks at what takes too long
FRAGMENT = 'freetrain_fragment'   # key of the resource specification that marks a fragment's task


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, each thing may take before it is given up.

    Attributes
    ----------
    start_s
        From the decision to the first training step.
    stop_s
        From the request to stop to the end.
    hang_s
        From a rank or a node that hangs (stopped, silent, unreachable) to the end of its fragment.
    peer_s
        From the first rank that ended in trouble to the last.
    step_s
        From one training step to the next, as rank 0 tells of them.
    """

    start_s: float = 120.0
    stop_s: float = 120.0
    hang_s: float = 15.0
    peer_s: float = 5.0
    step_s: float = 1800.0

    @property
    def silence_s(self) -> float:
        """Without a sign of life from a node; the rest of ``hang_s`` is for ending its fragment on the others."""
        return 0.8 * self.hang_s


@dataclass(frozen=True)
class Line:
    """Where the control channel listens, as nodes see it, and the template of their warm parents, if they can reach one."""

    addresses: list[str]
    port: int
    cert_dir: str | None
    interface: str | None
    template: str | None = None


class FragmentRunner:
    """Carries out StartFragment, StopFragment and AbandonFragment, and tells what became of them.

    Parameters
    ----------
    submit
        Sends one payload to the interchange: (context, buffer) -> future of the member's result.
    report
        Takes (trainer, fragment, member, future) when a member's task has come back; called from Parsl's thread.
    """

    def __init__(self, control: ControlServer, ledger: Ledger, line: Line, patience: Patience,
                 submit: Callable[[dict[str, Any], bytes], Future[Any]],
                 report: Callable[[str, int, int, Future[Any]], None]) -> None:
        self._control = control
        self._ledger = ledger
        self._line = line
        self._patience = patience
        self._submit = submit
        self._report = report
        self._forerunners = Forerunners(control, submit)
        self.gangs: dict[tuple[str, int], Gang] = {}
        self._verdicts: dict[tuple[str, int], Verdict] = {}
        self._silent: dict[str, str] = {}   # nodes that were given up, and why
        self._looked_at: float | None = None

    def start(self, action: ev.StartFragment, record: TrainerRecord, at: float) -> list[ev.Event]:
        """Submit the fragment's Parsl task; it comes back through :meth:`arrived`."""
        nodes, begins_with = record.resume(action.nodes)
        action = replace(action, nodes=nodes)
        gang = Gang(action, at, record.checkpoint, ranks_per_node=record.terms.ranks_per_node, reached=record.checkpoint.samples,
                    begins_with=begins_with)
        self.gangs[action.trainer, action.fragment] = gang
        self._ledger.fragment_decided(action.trainer, action.fragment, at=at, task_id=None, nodes=action.nodes,
                                      deadline=action.deadline_s, from_samples=action.samples)
        try:
            task = record.launch({FRAGMENT: f'{action.trainer}/{action.fragment}'}, record.last_good or record.checkpoint)
        except Exception as error:
            logger.exception('Fragment %s of %s could not be submitted', action.fragment, action.trainer)
            gang.lost = set(gang.members)
            gang.abandoned = f'it could not be submitted: {error}'
            return self._conclude(gang, record, at)
        record.fragment_started(len(action.nodes), task)
        self._ledger.trainer_state(action.trainer, at=at, state='running')
        task_record = getattr(task, 'task_record', None)
        if task_record is not None:
            self._ledger.fragment_task(action.trainer, action.fragment, task_record['id'])
        return []

    def arrived(self, context: Mapping[str, Any], buffer: bytes, outer: Future[Checkpoint], records: Mapping[str, TrainerRecord]) -> None:
        """Parsl hands over a fragment's task: pin one copy to each of its nodes."""
        name, _, number = context['resource_spec'][FRAGMENT].rpartition('/')
        gang = self.gangs.get((name, int(number)))
        if gang is None:
            _resolve(outer, self._verdicts.get((name, int(number))), f'Fragment {number} of trainer {name!r} is not known here.')
            return
        gang.outer, gang.task = outer, buffer
        earlier = context.get('task_executor', {}).get('f')
        for member in gang.members:
            if member in gang.lost:
                continue
            order = self._order(gang, member, records[name])
            inner = self._submit({
                'resource_spec': {PIN: gang.action.nodes[member]},
                'task_executor': {'f': 'parsl_freetrain.executor.member.run_member', 'a': (order, earlier)},
            }, buffer)
            inner.add_done_callback(lambda done, member=member: self._report(name, int(number), member, done))  # type: ignore[misc]

    def _order(self, gang: Gang, member: int, record: TrainerRecord) -> MemberOrder:
        terms = record.terms
        fragment = FragmentOrder(
            trainer=gang.name, fragment=gang.number, store=terms.store, total_samples=terms.total_samples,
            total_epochs=terms.total_epochs, mode=terms.mode, shards=terms.shards, seed=terms.seed,
            deadline=gang.action.deadline_s, checkpoint_every_s=terms.checkpoint_every_s,
            keep=terms.keep_checkpoints, scaled=terms.scaled, on_nan=terms.on_nan, shape=terms.shapes.get(len(gang.members)),
            interface=self._line.interface, threads=terms.threads_per_rank, ranks_per_node=terms.ranks_per_node,
            hang_s=self._patience.hang_s, handover=gang.begins_with)
        return MemberOrder(fragment, member, len(gang.members), self._line.addresses, self._line.port, self._line.cert_dir,
                           str(Path(terms.store) / 'logs'), self._line.template)

    def heard(self, message: Message, record: TrainerRecord | None, at: float) -> list[ev.Event]:
        """Take in a member's message."""
        gang = self.gangs.get((message['trainer'], message['fragment']))
        if gang is None or record is None:
            return []
        gang.heard[message['member']] = at
        match message['kind']:
            case 'member':
                gang.names[message['member']] = message['node']
                self._catch_up(gang, message['member'])
            case 'rendezvous':
                gang.rendezvous = message
                for member in gang.members:
                    self._control.send((gang.name, gang.number, member), message)
            case 'total':
                record.total_known(message['total_samples'])
                self._ledger.trainer_total(gang.name, message['total_samples'])
                return [ev.TotalKnown(at, gang.name, message['total_samples'])]
            case 'started' if message['rank'] == 0:
                gang.started_at, gang.stepped_at = message['at'], at
                gang.reached = max(gang.reached, message['samples'])
                self._ledger.fragment_started(gang.name, gang.number, at=message['at'], samples=message['samples'])
                paused, record.paused = record.paused, None
                if paused is not None and paused[0] != (nodes := len(gang.members)):
                    return [ev.Rescaled(at, gang.name, gang.number, paused[0], nodes, max(0.0, message['at'] - paused[1]))]
            case 'progress':
                gang.stepped_at = at
                gang.reached = max(gang.reached, message['samples'])
                record.progressed(message['samples'], message['metrics'])
                self._ledger.fragment_progress(gang.name, gang.number, at=message['at'], samples=message['samples'],
                                               rate=message['rate'], metrics=message['metrics'])
                return [ev.FragmentProgressed(at, gang.name, gang.number, message['samples'], message['rate'])]
            case 'checkpoint':
                gang.stepped_at = at
                record.checkpointed(gang.note_checkpoint(message))
                self._ledger.checkpoint(gang.name, gang.number, at=message['at'], samples=message['samples'],
                                        path=message['path'], seconds=message['seconds'], metrics=message['metrics'])
            case 'ahead' if message['member'] in gang.awaited:
                gang.awaited.discard(message['member'])
                if not gang.awaited:
                    self._ask_to_stop(gang, at)
            case 'rank-ended':
                gang.ended.setdefault(message['member'], {}).setdefault(message['rank'], at)
                if message['how'] not in ('finished', 'stopped'):
                    gang.trouble_at = gang.trouble_at or at
        return []

    def _catch_up(self, gang: Gang, member: int) -> None:
        """Tell a member that has just appeared what the others were told before."""
        key = (gang.name, gang.number, member)
        if gang.abandoned:
            self._control.send(key, {'kind': 'abandon', 'why': gang.abandoned})
        elif gang.stop and not gang.awaited:
            self._control.send(key, {'kind': 'stop', 'why': gang.stop})
        if gang.rendezvous:
            self._control.send(key, gang.rendezvous)

    def stop(self, action: ev.StopFragment, record: TrainerRecord, at: float) -> None:
        """Ask for a checkpoint and the end, at the next step boundary; where the trainer goes on at once, when the next ranks are ready."""
        gang = self.gangs.get((action.trainer, action.fragment))
        if gang is not None and not gang.stop:   # a rehearsed preemption does not wait for what comes next
            gang.stop, gang.stop_at, gang.goes_on = action.why, at, bool(action.then)
            if not self._forerunners.send(gang, action.then, lambda gang, wait_s: replace(self._order(gang, 0, record), ahead_s=wait_s)):
                self._ask_to_stop(gang, at)

    def hurry(self, at: float) -> None:
        """Something has happened: what is to stop stops now."""
        for gang in self.gangs.values():
            if gang.awaited:
                self._ask_to_stop(gang, at)

    def _ask_to_stop(self, gang: Gang, at: float) -> None:
        gang.awaited.clear()
        gang.stop_at = at
        self._tell_all(gang, {'kind': 'stop', 'why': gang.stop})

    def rehearse(self, name: str, grace_s: float, at: float) -> str:
        """Treat a trainer's running fragment as a preemption would: with a notice ``grace_s`` seconds ahead; what was done.

        Raises
        ------
        BadInput
            If none is running.
        """
        gang = next((g for g in self.gangs.values() if g.name == name and not g.abandoned), None)
        if gang is None:
            raise BadInput(f'No fragment of trainer {name!r} is running now.')
        which = f'Fragment {gang.number} of trainer {name!r} on {len(gang.members)} node{"s" * (len(gang.members) > 1)}'
        if grace_s <= 0:
            self._give_up(gang, 'a rehearsed preemption')
            return f'{which} is being killed.'
        gang.stop, gang.stop_at, gang.grace_s = gang.stop or 'a rehearsed preemption', at, grace_s
        gang.awaited.clear()
        self._tell_all(gang, {'kind': 'stop', 'why': gang.stop})
        return f'{which} has its notice, and is killed if it is still there in {grace_s:g} s.'

    def abandon(self, fragment: ev.AbandonFragment, why: str) -> None:
        """End what is left of a fragment at once."""
        gang = self.gangs.get((fragment.trainer, fragment.fragment))
        if gang is not None:
            self._give_up(gang, why)

    def _give_up(self, gang: Gang, why: str) -> None:
        if not gang.abandoned:
            gang.abandoned = why
            self._tell_all(gang, {'kind': 'abandon', 'why': why})

    def _tell_all(self, gang: Gang, message: Message) -> None:
        for member in gang.members:
            self._control.send((gang.name, gang.number, member), message)

    def node_of(self, name: str, number: int, member: int) -> str | None:
        """The node of a running fragment's member."""
        gang = self.gangs.get((name, number))
        return gang.action.nodes[member] if gang else None

    def lose(self, remaining: Collection[str], records: Mapping[str, TrainerRecord], at: float) -> list[ev.Event]:
        """Only the ``remaining`` nodes are left; fragments of which nothing is left are over."""
        over: list[ev.Event] = []
        for gang in list(self.gangs.values()):
            gang.lose(set(gang.action.nodes).difference(remaining), self._silent)
            if gang.over():
                over += self._conclude(gang, records[gang.name], at)
        return over

    def settled(self, name: str, number: int, member: int, done: Future[Any], records: Mapping[str, TrainerRecord],
                at: float) -> list[ev.Event]:
        """A member's task has come back."""
        gang = self.gangs.get((name, number))
        if gang is None:
            return []
        came = gang.settled[member] = came_back(done)
        if isinstance(came, BaseException) or any(outcome['how'] not in ('finished', 'stopped') for outcome in came):
            gang.trouble_at = gang.trouble_at or at
        return self._conclude(gang, records[name], at) if gang.over() else []

    def _conclude(self, gang: Gang, record: TrainerRecord, at: float) -> list[ev.Event]:
        verdict = gang.verdict()
        del self.gangs[gang.name, gang.number]
        self._verdicts[gang.name, gang.number] = verdict
        self._control.forget(gang.name, gang.number)
        record.fragment_ended(gang, verdict)
        record.pause(gang, verdict)
        self._ledger.trainer_state(gang.name, at=at, state='queued')
        self._ledger.fragment_ended(gang.name, gang.number, at=at, ending=verdict.ending.value, samples=verdict.checkpoint.samples,
                                    reached=max(gang.reached, verdict.checkpoint.samples), error=verdict.error)
        if gang.outer is not None:
            _resolve(gang.outer, verdict, '')
        last = gang.last_word()
        return [ev.FragmentTimed(at, gang.name, gang.number, None if gang.started_at is None else gang.started_at - gang.decided_at,
                                 last.get('step_s') or None, last.get('checkpoint_s') or None),
                ev.FragmentEnded(at, gang.name, gang.number, verdict.checkpoint.samples, verdict.ending, verdict.error)]

    def overdue(self, at: float) -> set[str]:
        """Give up what takes too long; nodes that do not answer at all, to be counted as lost.

        To be called about once a second, when all messages that have come are taken in.
        """
        patience = self._patience
        away_s = 0.0 if self._looked_at is None else at - self._looked_at - LOOK_S
        self._looked_at = at
        silent: dict[str, str] = {}
        for gang in self.gangs.values():
            if away_s > LOOK_S:
                gang.nobody_listened(away_s)
            silent |= gang.silent(at, patience.silence_s)
            if gang.trouble_at is not None and at - gang.trouble_at > patience.peer_s:
                self._give_up(gang, 'some of its ranks ended in trouble and the others did not notice')
            elif overdue(gang, at):
                self._ask_to_stop(gang, at)
            elif gang.stop and not gang.awaited and at - gang.stop_at > (
                    stop_s := patience.stop_s if gang.grace_s is None else gang.grace_s):
                self._give_up(gang, f'it did not stop within {stop_s:g} s')
            elif gang.started_at is None and at - gang.decided_at > patience.start_s:
                quiet = [gang.action.nodes[m] for m in gang.members if m not in gang.heard]
                self._give_up(gang, f'it did not start within {patience.start_s:g} s'
                                    + (f'; nothing was heard from {", ".join(quiet)}' if quiet else ''))
            elif gang.stepped_at is not None and at - gang.stepped_at > patience.step_s:
                self._give_up(gang, f'no training step ended within {patience.step_s:g} s: its function is in an endless loop, or a step '
                                    f'takes longer and needs a larger step_s of the executor; see "freetrain logs {gang.name}"')
        for node, why in silent.items():
            logger.warning('Node %s is given up: %s', node, why)
        self._silent |= silent
        return set(silent)


def _resolve(outer: Future[Checkpoint], verdict: Verdict | None, unknown: str) -> None:
    """Complete what Parsl waits for; a preempted fragment is no failure to Parsl, so it costs no retry there."""
    if verdict is None:
        outer.set_exception(RuntimeError(unknown))
    elif verdict.ending is Ending.FAILED and verdict.exception is not None:
        outer.set_exception(verdict.exception)
    else:
        outer.set_result(verdict.checkpoint)
