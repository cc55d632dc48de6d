"""Handles the messages of a fragment's members."""

from dataclasses import replace

from msgspec import structs

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.fragment.fragment_state import RunningFragment
from parsl_freetrain.executor.fragment.members import Members
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.host.clocks import NodeClocks
from parsl_freetrain.training.spec import messages as msg

RESERVE_S = 1e6  # seconds that ranks ahead wait if no rescale is due, as long as they may stay

THINNED_S, THINNED = 20.0, 0.02
"""Least time between recorded reports: in seconds, or as a part of the fragment's age if less."""


class Listener:
    def __init__(self, members: Members, stream: Stream, clocks: NodeClocks | None = None) -> None:
        self._members, self._stream = members, stream
        self._clocks = clocks or NodeClocks()

    def heard(
        self, said: msg.FromMember, fragment: RunningFragment, record: TrainerRecord, at: float
    ) -> None:
        """Record a member's message and emit events, with the time of their arrival."""
        member, message = said.member, said.message
        if member not in fragment.members or not _is_its_own(said, fragment):
            return
        fragment.contact.heard[member] = at
        fragment.contact.disconnected.discard(member)
        if isinstance(message, ev.Event):
            message = structs.replace(message, at=at)
        match message:
            case msg.Hello(node, clock):
                fragment.contact.names[member] = node
                self._clocks.measured(node, fragment.sent_at, clock, at)
                self._members.catch_up(fragment, member, at)
            case msg.Rendezvous() as rendezvous:
                fragment.rendezvous = rendezvous
                self._members.tell_all(fragment, rendezvous)
            case ev.TotalKnown(total_samples=total_samples) as known:
                record.trainer = replace(record.trainer, total_samples=total_samples)
                self._stream.emit(known)
            case ev.RoundKnown() as known:
                self._stream.emit(known)
            case ev.FragmentStarted() as started:
                fragment.keeps = fragment.keeps or started.keeps
                if started.rank == 0:
                    self._started(started, fragment, record)
            case msg.StateUsed():
                fragment.uses_state = True
            case ev.FragmentProgressed(samples=samples) as report:
                fragment.stepped_at = at
                fragment.contact.stuck.clear()
                fragment.reached = max(fragment.reached, samples)
                fragment.metrics = report.metrics
                self._progressed(report, fragment)
            case msg.Stuck(rank, exchange):
                fragment.contact.stuck[rank] = exchange, at
            case msg.SavingCheckpoint():
                fragment.saving = True
            case ev.CheckpointSaved(checkpoint=checkpoint) as saved:
                fragment.stepped_at, fragment.saving = at, False
                saved = structs.replace(saved, checkpoint=replace(checkpoint, at=at))
                record.checkpoint = fragment.note(saved.checkpoint)
                record.note_handed_in(checkpoint)
                last, fragment.unrecorded = fragment.unrecorded, None
                self._stream.emit(*([last] if last else []))
                self._stream.emit(saved)
            case msg.StandbyReady() if member in fragment.stopping.awaited:
                fragment.stopping.awaited.discard(member)
                if not fragment.stopping.awaited:
                    self._members.ask_to_stop(fragment, at, followed=True)
            case msg.RankEnded(rank, ok, died):
                fragment.ended.setdefault(member, {}).setdefault(rank, at)
                fragment.died = fragment.died or died
                if not ok:
                    self._members.in_trouble(fragment, at)
        if fragment.died and not fragment.saving and not fragment.stopping.why:
            # The others cannot train on. A checkpoint that is being written is worth the wait.
            self._members.give_up(fragment, 'one of its ranks died', spare=True)

    def _progressed(self, event: ev.FragmentProgressed, fragment: RunningFragment) -> None:
        """Pass a report on. They are most events: of old fragments, fewer are recorded."""
        age_s = event.at - fragment.decided_at
        if 0 <= event.at - fragment.recorded_at < min(THINNED_S, THINNED * age_s):
            fragment.unrecorded = event
            self._stream.pass_by(event)
        else:
            fragment.recorded_at, fragment.unrecorded = event.at, None
            self._stream.emit(event)

    def _started(
        self, started: ev.FragmentStarted, fragment: RunningFragment, record: TrainerRecord
    ) -> None:
        name, number, at = fragment.name, fragment.number, started.at
        if record.spec.ranks.ahead:
            self._members.tell_all(fragment, msg.StartStandby(RESERVE_S, rescale=False))
        fragment.started_at = fragment.stepped_at = at
        # It may not have got the state in memory that it was to go on from.
        fragment.reached = max(fragment.checkpoint.samples, started.samples)
        self._stream.emit(started)
        paused, record.paused = record.paused, None
        nodes = len(fragment.members)
        if paused is not None and paused[0] != nodes:
            seconds = max(0.0, at - paused[1])
            self._stream.emit(ev.Rescaled(at, name, number, paused[0], nodes, seconds))


def _is_its_own(said: msg.FromMember, fragment: RunningFragment) -> bool:
    match said.message:
        case ev.TotalKnown(trainer=trainer) | ev.RoundKnown(trainer=trainer):
            return trainer == fragment.name
        case ev.FragmentStarted() | ev.FragmentProgressed() as event:
            return (event.trainer, event.fragment) == (fragment.name, fragment.number)
        case ev.CheckpointSaved(checkpoint=checkpoint):
            return checkpoint.trainer == fragment.name
    return True
