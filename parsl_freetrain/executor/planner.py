"""The thread that drives the controller: it alone touches the controller, the ledger and the control channel."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from parsl.executors.high_throughput.errors import ManagerLost
from parsl.jobs.states import JobStatus

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.blocks import nodes_wanted
from parsl_freetrain.core.controller import Controller
from parsl_freetrain.core.errors import BadInput, TrainerFailed
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.executor.adoption import AdoptedBlock
from parsl_freetrain.executor.blocks import BlockKeeper
from parsl_freetrain.executor.control import ControlServer, key_of
from parsl_freetrain.executor.fragments import LOOK_S, FragmentRunner
from parsl_freetrain.executor.record import record_decision, record_event
from parsl_freetrain.executor.requests import Request, Requests
from parsl_freetrain.executor.trainers import TrainerRecord
from parsl_freetrain.ledger.store import Ledger
from parsl_freetrain.sites.provider import BackfillProvider

logger = logging.getLogger(__name__)

GREETING_POLL_S = 0.25
OFFERS_PERIOD_S = 5.0


@dataclass(frozen=True)
class Submit:
    record: TrainerRecord


@dataclass(frozen=True)
class Cancel:
    trainer: str


@dataclass(frozen=True)
class Adopted:
    block: AdoptedBlock


@dataclass(frozen=True)
class Arrived:
    context: dict[str, Any]
    buffer: bytes
    outer: Future[Checkpoint]


@dataclass(frozen=True)
class MemberBack:
    trainer: str
    fragment: int
    member: int
    done: Future[Any]


@dataclass(frozen=True)
class GreetingBack:
    block: str
    manager: str
    done: Future[Any]


@dataclass(frozen=True)
class Ordinary:
    change: int


@dataclass(frozen=True)
class Quiesce:
    """Stop every fragment with a checkpoint; ``quiet`` is set when the last has ended."""

    quiet: threading.Event


@dataclass(frozen=True)
class Stop:
    pass


class Planner:
    """Runs from :meth:`start` to :meth:`stop`; everybody else talks to it through :meth:`post`.

    Parameters
    ----------
    statuses
        Asks the batch system for the state of all blocks, through Parsl.
    trouble
        A sentence if Parsl's own part of the executor has broken down, else an empty string.
    run_id
        Parsl's id of this run, which the ledger has begun under.
    requests
        What other programs of the user ask of this run.
    clock
        Seconds since the epoch.
    """

    def __init__(self, controller: Controller, control: ControlServer, ledger: Ledger, provider: BackfillProvider,
                 blocks: BlockKeeper, fragments: FragmentRunner, statuses: Callable[[], dict[str, JobStatus]],
                 trouble: Callable[[], str], run_id: str, requests: Requests,
                 clock: Callable[[], float] = time.time) -> None:
        self._controller = controller
        self._control = control
        self._ledger = ledger
        self._provider = provider
        self._blocks = blocks
        self._fragments = fragments
        self._statuses = statuses
        self._trouble = trouble
        self._run_id = run_id
        self._requests = requests
        self._broken = False
        self._clock = clock
        self._records: dict[str, TrainerRecord] = {}
        self._ordinary = 0
        self._quiet: threading.Event | None = None
        self._stopping = False
        self._begun_at = clock()
        self._thread = threading.Thread(target=self._run, name='FreeTrain-Planner', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, item: object) -> None:
        """Hand a command to the planner; from any thread."""
        self._control.post(item)

    def stop(self, timeout_s: float) -> None:
        """End the thread; trainers that have not ended fail with a sentence that says how to go on."""
        self.post(Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        next_poll = next_offers = next_look = 0.0
        while not self._stopping:
            now = self._clock()
            if now >= next_poll:
                self._guarded(self._poll)
                next_poll = self._clock() + self._provider.site.poll_s   # a slow answer is no reason to ask again at once
            if now >= next_offers:
                self._guarded(self._note_offers)
                next_offers = now + OFFERS_PERIOD_S
            pause = min(next_poll, next_look) - now
            if self._blocks.starting() and not self._broken:
                self._guarded(self._greet)
                pause = min(pause, GREETING_POLL_S)
            self._ledger.commit()
            for item in self._control.receive(max(pause, 0.0)):
                self._guarded(self._take, item)
            if (now := self._clock()) >= next_look:
                next_look = now + LOOK_S
                self._guarded(self._look_after_fragments)
                self._guarded(self._look_for_requests)
            if self._quiet is not None and not self._fragments.gangs:
                self._quiet.set()
        self._guarded(self._finish)

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        """A planner that dies would leave every trainer waiting for ever: log and go on."""
        try:
            step(*args)
        except Exception:
            logger.exception('The planner went on after an error in %s', getattr(step, '__name__', step))

    def _take(self, item: object) -> None:
        now = self._clock()
        match item:
            case dict():
                self._tell(*self._fragments.heard(item, self._records.get(item['trainer']), now))
                if item['kind'] == 'notice' and (node := self._fragments.node_of(*key_of(item))):
                    self._tell(*self._blocks.noticed(node, now))
            case Submit(record):
                self._submit(record, now)
            case Cancel(trainer):
                self._tell(ev.TrainerCancelled(now, trainer))
            case Adopted(block):
                self._tell(*self._blocks.adopt(block, now))
            case Arrived(context, buffer, outer):
                self._fragments.arrived(context, buffer, outer, self._records)
            case MemberBack(trainer, fragment, member, done):
                if isinstance(done.exception(), ManagerLost) and (node := self._fragments.node_of(trainer, fragment, member)):
                    self._lose({node}, now)
                self._tell(*self._fragments.settled(trainer, fragment, member, done, self._records, now))
            case GreetingBack(block, manager, done):
                events, hopeless = self._blocks.greeted(block, manager, done, now)
                self._tell(*events)
                if hopeless:
                    self._give_up(hopeless)
            case Ordinary(change):
                self._ordinary += change
                self._tell(ev.OrdinaryWork(now, self._ordinary))
                if change > 0 and not self._blocks.blocks:
                    self._look_for_holes(now)
            case Quiesce(quiet):
                self._quiet = quiet
                self._tell(ev.ShutdownRequested(now))
            case Stop():
                self._stopping = True

    def _submit(self, record: TrainerRecord, now: float) -> None:
        name = record.trainer.name
        self._records[name] = record
        curve = record.trainer.curve
        self._ledger.trainer(name=name, at=now, total_samples=record.trainer.total_samples, samples=record.checkpoint.samples, spec={
            'min_nodes': record.trainer.counts()[0], 'max_nodes': record.trainer.counts()[-1], 'mode': record.terms.mode,
            'rescale_up_s': record.trainer.rescale_up_s, 'rescale_down_s': record.trainer.rescale_down_s,
            'stated_costs': list(record.trainer.stated_costs),
            **({'sizes': list(record.trainer.sizes)} if record.trainer.sizes else {}),
            **({'shapes': {str(nodes): str(shape) for nodes, shape in record.terms.shapes.items()}} if record.terms.shapes else {}),
            **({'curve': {'nodes': list(curve.nodes), 'rate': list(curve.rate)}} if curve else {})})
        record.queued()
        self._tell(ev.TrainerSubmitted(now, record.trainer, record.checkpoint.samples, record.fragments_before))
        self._look_for_holes(now)

    def _tell(self, *events: ev.Event) -> None:
        """Give events to the controller and do what it says; what follows from that comes after."""
        waiting = list(events)
        while waiting:
            event = waiting.pop(0)
            record_event(self._ledger, event)
            reply = self._controller.handle(event)
            if reply.decision is not None:
                record_decision(self._ledger, reply.decision)
            for action in reply.actions:
                waiting += self._do(action, event.at)
            if isinstance(event, (ev.BlockEndKnown, ev.TrainerCancelled, ev.ShutdownRequested)):
                self._fragments.hurry(event.at)
            if isinstance(event, (ev.NodesLeft, ev.BlockClosed)):
                waiting += self._fragments.lose(self._controller.state.pool.nodes.keys(), self._records, event.at)

    def _do(self, action: ev.Action, at: float) -> list[ev.Event]:
        match action:
            case ev.OpenBlock(request):
                return self._blocks.open(request, at)
            case ev.CloseBlock(block, why):
                logger.info('Giving block %s back: %s', block, why)
                return self._blocks.close(block, at)
            case ev.StartFragment(trainer):
                return self._fragments.start(action, self._records[trainer], at)
            case ev.StopFragment(trainer):
                self._fragments.stop(action, self._records[trainer], at)
            case ev.AbandonFragment():
                self._fragments.abandon(action, 'some of its nodes are gone')
            case ev.EndTrainer(trainer, state, why):
                self._end(trainer, state, why, at)
        return []

    def _end(self, name: str, state: str, why: str, at: float) -> None:
        record = self._records[name]
        self._ledger.trainer_state(name, at=at, state=state, why=why)
        error: BaseException | None = None
        if state == 'failed':
            error = record.failure or TrainerFailed(f'Trainer {name!r} failed: {why}.')
        record.settle(state, error)

    def _poll(self) -> None:
        now = self._clock()
        if trouble := self._trouble():
            if not self._broken:
                self._broken = True
                self._give_up(trouble)
            return
        self._tell(*self._blocks.poll(self._statuses(), now))
        self._look_for_holes(now)
        self._tell(ev.Tick(now))

    def _look_after_fragments(self) -> None:
        now = self._clock()
        if silent := self._fragments.overdue(now):
            self._lose(silent, now)

    def _look_for_requests(self) -> None:
        for request in self._requests.new():
            try:
                self._requests.answer(request, True, self._fulfil(request))
            except BadInput as error:
                self._requests.answer(request, False, str(error))

    def _fulfil(self, request: Request) -> str:
        now = self._clock()
        if request.trainer not in self._records:
            raise BadInput(f'There is no trainer {request.trainer!r} in this run; it has {", ".join(map(repr, self._records)) or "none"}.')
        match request.verb:
            case 'preempt':
                return self._fragments.rehearse(request.trainer, float(request.options.get('grace_s', 0.0)), now)
            case 'cancel':
                future = self._records[request.trainer].future
                if future.done():
                    raise BadInput(f'Trainer {request.trainer!r} is {future.state} already.')
                self._tell(ev.TrainerCancelled(now, request.trainer))
                return (f'Trainer {request.trainer!r} is being cancelled; what it has trained is kept in '
                        f'{self._records[request.trainer].terms.store}.')
        raise BadInput(f'This run does not know how to {request.verb!r}.')

    def _lose(self, nodes: set[str], now: float) -> None:
        self._blocks.lose(nodes, now)
        self._tell(ev.NodesLeft(now, tuple(nodes)))

    def _look_for_holes(self, now: float) -> None:
        if nodes_wanted(self._controller.state, self._controller.settings) > 0 and self._quiet is None:
            self._tell(*self._blocks.holes(now))

    def _greet(self) -> None:
        self._blocks.greet_new(self._clock())

    def _give_up(self, why: str) -> None:
        now = self._clock()
        for record in [r for r in self._records.values() if not r.future.done()]:
            name = record.trainer.name
            self._tell(ev.TrainerCancelled(now, name))
            self._ledger.trainer_state(name, at=now, state='failed', why=why)
            record.settle('failed', TrainerFailed(f'Trainer {name!r} cannot go on: {why}.'))

    def _note_offers(self) -> None:
        now = self._clock()
        self._ledger.offers((o.node, o.start, o.end) for o in self._provider.site.offers(self._begun_at, now))
        self._ledger.alive(now)

    def _finish(self) -> None:
        now = self._clock()
        for block in list(self._blocks.blocks):
            self._blocks.close(block, now)
        self._note_offers()
        for record in self._records.values():
            if not record.future.done():
                self._ledger.trainer_state(record.trainer.name, at=now, state='interrupted')
                record.settle('failed', TrainerFailed(
                    f'Trainer {record.trainer.name!r} was interrupted at {record.checkpoint.samples} samples because its executor '
                    f'was shut down; its checkpoints are in {record.terms.store}, and the same call continues from there.'))
        self._ledger.end_run(self._run_id, at=now, how='shutdown')
        self._ledger.close()
        self._control.close()
