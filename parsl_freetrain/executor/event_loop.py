"""The event loop: one thread gathers events, lets the controller decide, and carries it out."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from parsl.executors.high_throughput.errors import ManagerLost

from parsl_freetrain.core.controller.block_policy import nodes_wanted
from parsl_freetrain.core.controller.controller import Controller, DecisionFailed
from parsl_freetrain.core.controller.controller_state import Reply
from parsl_freetrain.core.controller.runtime import carry_out
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import TrainerFailed, nodes_text
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor import commands as co
from parsl_freetrain.executor import off_loop
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.block.blocks import BlockManager, GreetingReturned
from parsl_freetrain.executor.commands import OfferChanges, gather
from parsl_freetrain.executor.fragment.control_channel import ControlServer, MemberDisconnected
from parsl_freetrain.executor.fragment.listener import THINNED, THINNED_S
from parsl_freetrain.executor.fragment.runner import FragmentRunner, MemberReturned
from parsl_freetrain.executor.fragment.trainer_record import TellReplica, TrainerRecord
from parsl_freetrain.executor.fragment.watchdog import LOOK_S
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.requests import RequestHandler
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.host.clocks import RunClock
from parsl_freetrain.sites.protocols import Site, Yielding
from parsl_freetrain.training.spec.messages import FromMember, Notice

logger = logging.getLogger(__name__)

GREETING_POLL_S = 0.25
OFFERS_PERIOD_S = 5.0
ANSWER_S = 2.0  # maximum seconds for the scheduler's answer, before the old one is looked at
OFFERS_BACK_S = 3600.0  # maximum age, in seconds, of node offers that a site is asked about
MOST_FAILURES = 20  # number of consecutive failures of the allocator after which the run ends


class EventLoop:
    """Runs from :meth:`start` to :meth:`stop`; other threads use only :meth:`post`."""

    def __init__(
        self,
        controller: Controller,
        control: ControlServer,
        stream: Stream,
        site: Site,
        blocks: BlockManager,
        fragments: FragmentRunner,
        parsl: ParslSide,
        requests: RequestHandler,
        clock: RunClock | None = None,
    ) -> None:
        self._controller, self._control, self._stream = controller, control, stream
        self._site, self._blocks, self._fragments, self._parsl = site, blocks, fragments, parsl
        self._runtime = LiveRuntime(blocks, fragments)
        self._requests = requests
        self._clock = clock or RunClock()
        self._broken = ''  # why no trainer can continue
        self._failures = 0  # consecutive failures of the allocator
        self._ordinary = 0
        self._holes_wanted = False
        self._quiet: threading.Event | None = None
        self._stopping = False
        self._next_poll = self._next_offers = self._next_look = 0.0
        self._asked = False  # the scheduler, which has not answered yet
        self._asked_at = 0.0
        self._polled_early_at = 0.0  # since a node has disconnected
        self._begun_at = self._clock()
        self._kept_problem_at = 0.0
        self._offers = OfferChanges(OFFERS_PERIOD_S + 2 * site.poll_s)
        self._ended = ''
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name='FreeTrain-EventLoop', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: co.Command) -> None:
        """Pass a command to the event loop, from any thread; refused if the loop has ended."""
        with self._ending:
            if not self._ended:
                self._control.post(command)
                return
        self._refuse(command)

    def stop(self, timeout_s: float) -> None:
        """End the thread. Unfinished trainers fail, with a message that says how to resume."""
        self.post(co.Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        why, how = 'its executor was shut down', 'shutdown'
        with off_loop.beside_this_thread():
            try:
                while not self._stopping:
                    self._round()
            except BaseException as error:
                logger.exception('The event loop has ended')
                why = f'the event loop of its executor ended with {type(error).__name__}: {error}'
                how = 'error'
            self._finish(why, how)

    def _round(self) -> None:
        now = self._clock()
        pause = min(self._next_poll, self._next_look) - now
        if self._blocks.starting() and not self._broken:
            self._guarded(self._blocks.greet_new)
            pause = min(pause, GREETING_POLL_S)
        items = gather(self._control, max(pause, 0.0), self._blocks.answering, self._clock)
        now = self._clock()
        for item in items:
            self._guarded(self._take, item, now)
        for node, why in self._fragments.faulty().items():
            self._guarded(self._blocks.avoid, node, why, now)
        if now >= self._next_poll:
            if not self._asked:
                self._asked_at = now
            self._asked = not self._asked and self._ask()
            if self._asked:
                self._next_poll = now + ANSWER_S
            else:
                self._guarded(self._poll, now)
                # Do not ask again at once after a slow answer.
                poll_s, answered_at = self._site.poll_s, self._clock()
                self._next_poll = max(self._asked_at + poll_s, answered_at + poll_s / 2)
        self._next_look = min(self._next_look, now + self._fragments.look_within_s())
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._guarded(self._look, now)
        if now >= self._next_offers:
            self._next_offers = now + OFFERS_PERIOD_S
            self._guarded(self._note_offers, now)
        self._handle_all(now)
        if self._holes_wanted and self._quiet is None:
            self._holes_wanted = False
            if nodes_wanted(self._controller.state) > 0:
                self._guarded(self._blocks.look_for_holes, now)
                self._handle_all(now)
        self._stream.flush()
        if self._quiet is not None and not self._fragments.running:
            # A Ctrl-C at this moment can free the event's lock under us; the event is set then.
            with suppress(RuntimeError):
                self._quiet.set()

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        try:
            step(*args)
        except BaseException:  # members' results may raise anything
            name = getattr(step, '__name__', step)
            logger.exception('The event loop goes on after an error in %s', name)

    def _take(self, item: Any, now: float) -> None:
        match item:
            case FromMember(message=message):
                self._fragments.heard(item, now)
                node = self._fragments.node_of(*item.sender)
                if isinstance(message, Notice) and node:
                    self._blocks.noticed(node, now)
            case TrainerRecord():
                self._submit(item, now)
            case co.CancelTrainer(trainer):
                self._stream.emit(ev.TrainerCancelled(now, trainer))
            case TellReplica():
                self._replica_told(item, now)
            case AdoptedBlock():
                self._blocks.adopt(item, now)
            case co.TaskArrived(context, buffer, outer):
                self._fragments.arrived(context, buffer, outer)
            case MemberReturned(trainer, fragment, member, done):
                node = self._fragments.node_of(trainer, fragment, member)
                if node and isinstance(done.exception(), ManagerLost):
                    self._blocks.lose({node}, now)
                self._fragments.returned(item, now)
                if node:
                    self._blocks.result_arrived(node)
            case MemberDisconnected():
                early = now - self._polled_early_at >= self._site.poll_s
                if self._fragments.disconnected(item, now) and early:
                    self._polled_early_at = self._next_poll = now
            case GreetingReturned(block, manager, done):
                if hopeless := self._blocks.greeted(block, manager, done, now):
                    self._abort_all(hopeless, now)
            case co.SchedulerAnswered() if self._asked:
                self._next_poll = now
            case co.OrdinaryTasks(change):
                self._ordinary += change
                self._stream.emit(ev.OrdinaryWork(now, self._ordinary))
                self._holes_wanted |= change > 0 and not self._blocks.blocks
            case co.Quiesce(quiet):
                self._quiet = quiet
                self._stream.emit(ev.ShutdownRequested(now))
            case co.Stop():
                self._stopping = True

    def _submit(self, record: TrainerRecord, now: float) -> None:
        name, spec = record.trainer.name, record.spec
        self._fragments.records[name] = record
        begun = record.checkpoint.samples, record.fragments_before
        how = str(spec.mode), spec.total_epochs
        self._stream.emit(ev.TrainerSubmitted(now, record.trainer, *begun, *how))
        if self._broken:
            self._stream.emit(ev.TrainerAborted(now, name, self._broken))
        self._holes_wanted = True

    def _replica_told(self, told: TellReplica, now: float) -> None:
        here = [
            name
            for name, record in self._fragments.records.items()
            if record.trainer.training == told.training and not record.future._ended
        ]
        if told.ending in ('', 'finished'):
            self._stream.emit(ev.ReplicaReached(now, told.trainer, told.training, told.samples))
        elif here and told.ending == 'cancelled':
            self._stream.emit(ev.TrainerCancelled(now, here[0]))
        elif here:
            why = f'its replica {told.trainer!r} has ended: {told.why}'
            self._stream.emit(ev.TrainerAborted(now, here[0], why))

    def _abort_all(self, why: str, now: float) -> None:
        for name, record in self._fragments.records.items():
            if not record.future._ended:
                self._stream.emit(ev.TrainerAborted(now, name, why))

    def _ask(self) -> bool:
        """Whether the scheduler is asked now; meanwhile members are listened to."""
        site = self._site
        return isinstance(site, Yielding) and site.ask(lambda: self.post(co.SchedulerAnswered()))

    def _poll(self, now: float) -> None:
        if self._broken:
            return
        self._blocks.poll(self._parsl.statuses(), now)
        self._stream.emit(ev.Tick(now))
        self._blocks.look_for_needs(now)
        self._holes_wanted = True

    def _look(self, now: float) -> None:
        """Check Parsl's part, time limits, budgets, pauses, and requests of other programs."""
        if not self._broken and (over := getattr(self._site, 'over', '')):
            self._broken = over
            self._abort_all(over, now)
        if not self._broken and (trouble := self._parsl.trouble()):
            self._broken = trouble
            self._abort_all(trouble, now)
            self._guarded(self._parsl.fail_all, trouble)
        self._guarded(self._blocks.leaving.cancel, now)
        if silent := self._fragments.look(now):
            self._blocks.lose(silent, now)
        if self._controller.state.next_change_s() <= now:
            self._stream.emit(ev.Tick(now))
        self._requests.look(now)

    def _handle_all(self, now: float) -> None:
        """Give emitted events to the controller, carry out its actions; repeat with theirs."""
        while events := self._stream.next_batch():
            reply = Reply()
            try:
                reply = self._controller.handle_all(events, now)
                self._failures = 0
            except DecisionFailed as failed:  # the next event asks the allocator again
                logger.exception('No decision could be made')
                reply = Reply(failed.actions)
                self._failures += 1
                if self._failures >= MOST_FAILURES:
                    raise
            finally:
                self._stream.emit(self._decided(reply, now))
            carry_out(self._runtime, reply.actions, now, self._guarded)
            if any(isinstance(event, _URGENT) for event in events):
                self._fragments.hurry(now)

    def _decided(self, reply: Reply, now: float) -> ev.Decided:
        """The event that a batch was handled. Of those that change nothing, few are kept."""
        if reply.decision is None:
            return ev.Decided(now, reply.actions)
        age_s, since_s = now - self._begun_at, now - self._kept_problem_at
        keep = bool(reply.actions) or not 0 <= since_s < min(THINNED_S, THINNED * age_s)
        if keep:
            self._kept_problem_at = now
        return reply.decision.event(now, reply.actions, keep_problem=keep)

    def _note_offers(self, now: float, last: bool = False) -> None:
        since, ahead_s = max(self._begun_at, now - OFFERS_BACK_S), self._clock.ahead_s
        seen = self._site.offers(since + ahead_s, now + ahead_s)
        offers = [replace(one, start=one.start - ahead_s, end=one.end - ahead_s) for one in seen]
        self._stream.emit(ev.OffersSeen(now, self._offers.new(offers, now, last=last)))

    def _finish(self, why: str, how: str) -> None:
        """Give back all blocks, and settle everything that other threads wait for."""
        now = self._clock()
        for name, record in self._fragments.records.items():
            if not record.future._ended:
                sentence = (
                    f'Trainer {name!r} was interrupted at {record.checkpoint.samples} samples '
                    f'because {why}; its checkpoints are in {record.store}, and the same '
                    'call continues from there.'
                )
                self._guarded(self._stream.emit, ev.TrainerInterrupted(now, name, sentence))
        # After the futures: nodes that are given back now make no preemption there.
        self._guarded(self._blocks.close, list(self._blocks.blocks), now)
        self._guarded(self._blocks.leaving.cancel, math.inf)
        self._guarded(self._note_offers, now, True)
        self._guarded(self._fragments.end, why)
        self._stream.emit(ev.RunEnded(now, how))
        with self._ending:
            self._ended = why
        for item in self._control.posted():
            self._guarded(self._refuse, item)
        self._guarded(self._control.close)
        self._stream.close()

    def _refuse(self, item: Any) -> None:
        match item:
            case TrainerRecord(trainer=trainer, future=future):
                why = f'Trainer {trainer.name!r} cannot start because {self._ended}.'
                future._settle_failed(TrainerFailed(why))
            case co.TaskArrived(outer=outer):
                outer.set_exception(TrainerFailed(f'The fragment ended because {self._ended}.'))
            case co.Quiesce(quiet):
                quiet.set()


_URGENT = (
    ev.BlockEndKnown,
    ev.NodesNeeded,
    ev.TrainerCancelled,
    ev.TrainerAborted,
    ev.ShutdownRequested,
)


class LiveRuntime:
    def __init__(self, blocks: BlockManager, fragments: FragmentRunner) -> None:
        self._blocks, self._fragments = blocks, fragments

    def open(self, request: BlockRequest, at: float) -> None:
        self._blocks.open(request, at)

    def close(self, blocks: Sequence[ev.CloseBlock], at: float) -> None:
        for one in blocks:
            logger.info('Giving block %s back: %s', one.block, one.why)
        self._blocks.close([one.block for one in blocks], at)

    def release(self, nodes: ev.ReleaseNodes, at: float) -> None:
        count = nodes_text(len(nodes.nodes))
        logger.info('Giving %s of block %s back: %s', count, nodes.block, nodes.why)
        self._blocks.release(nodes.block, nodes.nodes, at)

    def launch(self, fragment: ev.StartFragment, at: float) -> None:
        self._fragments.start(fragment, at)

    def send(self, stop: ev.StopFragment, at: float) -> None:
        self._fragments.stop(stop, at)

    def kill(self, fragment: ev.AbandonFragment, at: float) -> None:
        self._fragments.abandon(fragment)
