"""A machine on a virtual clock with the real event loop, blocks and fragments: nodes, members and
the scheduler are played, and a seed decides when messages arrive, are lost or doubled.
"""

from __future__ import annotations

import heapq
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from parsl.executors.high_throughput.errors import ManagerLost
from parsl.jobs.states import JobState, JobStatus

import parsl_freetrain as ft
from parsl_freetrain import Checkpoint, FreeTrainError, Timeouts, TrainingFuture
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Hole
from parsl_freetrain.executor import commands as co
from parsl_freetrain.executor.block.blocks import BlockManager
from parsl_freetrain.executor.event_loop import EventLoop
from parsl_freetrain.executor.fragment.control_channel import MemberDisconnected
from parsl_freetrain.executor.fragment.member_order import ControlEndpoint, RankResult
from parsl_freetrain.executor.fragment.runner import FRAGMENT, FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.executor.fragment.worker_tasks import Greeting
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.host.clocks import RunClock
from parsl_freetrain.solver import allocator_named
from parsl_freetrain.training.spec import messages as msg
from tests.support.fit import fit

TIMEOUTS = Timeouts(
    start_s=20.0, stop_s=10.0, hang_s=6.0, step_s=30.0, join_s=15.0, peer_s=3.0, stop_grace_s=2.0
)
FAULTS_S, CALM_S = 60.0, 400.0
"""For so long things go wrong; after that, everything must have ended within so many seconds."""
PER_NODE, RATE = 1300, 40.0


@dataclass
class Node:
    """One node of a block. Its worker runs one task after the other."""

    name: str
    block: str
    alive: bool = True
    silent_until: float = 0.0
    busy: Member | None = None
    queue: list[Callable[[], object]] = field(default_factory=list)

    def after_the_others(self, task: Callable[[], object]) -> None:
        """Do a task when the worker is free."""
        self.queue.append(task)
        if self.busy is None and len(self.queue) == 1:
            self.next()

    def next(self) -> None:
        """The worker takes the next task."""
        if self.alive and self.busy is None and self.queue:
            self.queue.pop(0)()


@dataclass
class Job:
    name: str
    nodes: int
    state: JobState = JobState.PENDING
    until: float = math.inf
    members: list[Node] = field(default_factory=list)


class Store:
    """The checkpoints of a trainer: samples and fragment, and the newest fence."""

    def __init__(self) -> None:
        self.committed, self.fence = [(0, 0)], 0

    def begin(self, fragment: int) -> int:
        self.fence = max(self.fence, fragment)
        return self.committed[-1][0]

    def commit(self, samples: int, fragment: int) -> bool:
        if fragment < self.fence:
            return False
        self.committed.append((samples, fragment))
        return True


class Errors(logging.Handler):
    """What the event loop got over: it logs exceptions, broken promises too, and goes on."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised = list[BaseException]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            self.raised.append(error)


class World:
    """One to four trainers on four to sixteen nodes. ``said``: every event. ``nodes``: so many,
    which all come at once. ``stay_s``: nodes come one by one, and go after so long. ``quick``:
    rates are stated and nodes shared equally, so that decisions take less time.
    """

    def __init__(
        self, seed: int, nodes: int = 0, stay_s: float | None = None, *, quick: bool = False
    ) -> None:
        self.scaling = ft.Scaling(rate={1: RATE, 64: 64 * RATE} if quick else None)
        self.draw, self.now = random.Random(seed), 1e6
        self.size, trainers = self.draw.choice([4, 4, 8, 16]), self.draw.choice([1, 2, 2, 4])
        self.size, self.at_once, self.stay_s = nodes or self.size, bool(nodes), stay_s
        trainers = 4 if stay_s else trainers
        self.totals = dict[str, int]()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.begun_at, self.said = self.now, list[ev.Event]()
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, Node] = {}
        self.members: dict[tuple[str, int, int], Member] = {}
        self.stores = {f't{n}': Store() for n in range(trainers)}
        self.ended: dict[str, str] = {}
        self.posted, self.inbox = list[Any](), list[Any]()
        self._last_arrival: dict[object, float] = {}
        clock = RunClock(lambda: self.now, lambda: self.now)
        self.stream = Stream([cast(Any, self)])
        control, parsl = cast(Any, Control(self)), cast(Any, Parsl(self))
        records = {name: self._record(name) for name in self.stores}
        self.runner = FragmentRunner(
            control, self.stream, ControlEndpoint([], 0, None, None, ''), TIMEOUTS, parsl, {}, clock
        )
        self.stream.subscribers.append(self.runner)
        self.provider = Provider(self)
        self.blocks = BlockManager(
            cast(Any, self.provider), self.stream, control, '', parsl, None, TIMEOUTS.join_s, clock
        )
        settings = ControllerSettings(
            horizon_s=20.0, retries=10**6, stalls=10**6, min_hole_s=1.0, idle_block_s=10.0
        )
        solver = allocator_named('equal-share' if quick else 'auto', isolated=False)
        self.controller = Controller(solver, settings)
        quiet = cast(Any, SimpleNamespace(look=lambda at: None))
        self.loop = EventLoop(
            self.controller, control, self.stream, cast(Any, self.provider.site), self.blocks,
            self.runner, parsl, quiet, clock,
        )  # fmt: skip
        for record in records.values():
            self.after(self.draw.uniform(0, 5), partial(self._submit, record))
        self.after(1.0, self._accident)

    def _record(self, name: str) -> TrainerRecord:
        most = self.draw.choice([1, 3, self.size])
        self.totals[name] = PER_NODE * most
        app = ft.freetrain_app(
            max_nodes=most, total_samples=self.totals[name], scaling=self.scaling
        )
        spec = app(fit).spec
        launched = lambda specification, previous: self._launch(specification)  # noqa: E731
        start = Checkpoint(name, '', 0, 0)
        return TrainerRecord(
            spec.trainer(name), spec, '/store', launched, TrainingFuture(name), start
        )

    def _submit(self, record: TrainerRecord) -> None:
        self.posted.append(record)

    def _launch(self, specification: Any) -> Future[Checkpoint]:
        task: Future[Checkpoint] = Future()
        arrived = co.TaskArrived({'resource_spec': dict(specification)}, b'', task)
        if self.calm or self.draw.random() > 0.02:  # else Parsl never passes it on
            self.after(self.draw.uniform(0.001, 0.3), lambda: self.posted.append(arrived))
        return task

    # ---- time ----

    @property
    def calm(self) -> bool:
        return self.now - self.begun_at > FAULTS_S

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, do))

    def arrives(self, way: object, do: Callable[[], None], *, once: bool = False) -> None:
        """Later; messages keep their order, but some are lost, doubled (unless ``once``), late."""
        draw = self.draw
        delay = draw.expovariate(1 / 0.01) + (draw.random() < 0.05) * draw.uniform(0, 2.0)
        if not self.calm:
            if draw.random() < 0.01:
                return
            if not once and draw.random() < 0.02:
                self.after(delay + draw.uniform(0, 3.0), do)
            if draw.random() < 0.02:
                self.after(delay, do)
                return
        at = max(self._last_arrival.get(way, 0.0), self.now + delay)
        self._last_arrival[way] = at
        self.after(at - self.now, do)

    def pass_time(self, seconds: float) -> None:
        """Until something has come in for the event loop, at most for so long."""
        until = self.now + seconds
        while not (self.posted or self.inbox) and self._due and self._due[0][0] <= until:
            self.now, _, do = heapq.heappop(self._due)
            do()
        if not (self.posted or self.inbox):
            self.now = until

    def run(self) -> None:
        """Until all trainers have ended and all nodes are given back, or time is over."""
        logger, errors = logging.getLogger('parsl_freetrain'), Errors()
        logger.addHandler(errors)
        try:
            while self.now < self.begun_at + FAULTS_S + CALM_S:
                self.loop._round()
                for error in errors.raised:
                    raise error
                self.check()
                if len(self.ended) == len(self.stores) and not self.blocks.blocks:
                    return
        finally:
            logger.removeHandler(errors)
        raise AssertionError(
            f'not over after {CALM_S:g} s without faults: ended {self.ended}, blocks '
            f'{list(self.blocks.blocks)}, fragments {list(self.runner.running)}'
        )

    # ---- promises ----

    def take(self, event: ev.Event) -> None:
        self.said.append(event)
        if isinstance(event, ev.Decided):
            for action in event.actions:
                if isinstance(action, ev.EndTrainer):
                    assert action.trainer not in self.ended, f'{action} ended twice'
                    self.ended[action.trainer] = action.state
                if isinstance(action, ev.StartFragment):
                    self._started(action)

    def flush(self) -> None:
        pass

    def _started(self, action: ev.StartFragment) -> None:
        name, number = action.trainer, action.fragment
        before = [key for key in self.runner.running if key[0] == name]
        assert not before, f'fragments {before} and {number} of {name} at once'
        assert number > self.stores[name].fence, f'fragment {number} of {name} fences nobody out'
        for fragment in self.runner.running.values():
            held = {fragment.action.nodes[m] for m in fragment.members if m not in fragment.lost}
            assert not held & set(action.nodes), f'{action.nodes} are held by two fragments'

    def check(self) -> None:
        """What must hold after every round."""
        for (name, number), fragment in self.runner.running.items():
            age_s = self.now - fragment.decided_at
            limit_s = 3 * (TIMEOUTS.start_s + TIMEOUTS.hang_s)
            assert fragment.started_at is not None or age_s < limit_s, (
                f'{name}/{number} neither starts nor ends: {fragment}'
            )
            gone = fragment.given_up.seen_at
            assert gone is None or self.now < gone + 2 * TIMEOUTS.hang_s + TIMEOUTS.peer_s, (
                f'{name}/{number} was given up and does not end: {fragment}'
            )
        for name, record in self.runner.records.items():
            known = record.checkpoint.samples, record.checkpoint.fragment
            assert known in self.stores[name].committed, f'{name}: {known} is not committed'

    # ---- accidents ----

    def _accident(self) -> None:
        if self.calm:
            self._heal()
            return
        here = [node for node in self.nodes.values() if node.alive]
        if here:
            node, kind = self.draw.choice(here), self.draw.random()
            if kind < 0.3:
                self.kill(node)
            elif kind < 0.6:
                node.silent_until = self.now + self.draw.uniform(0, 20)
            elif kind < 0.75:
                self.take_block(self.jobs[node.block])
            elif kind < 0.9 and node.busy is not None:
                node.busy.crash()
            elif node.busy is not None:
                gone = MemberDisconnected(*node.busy.key)
                self.arrives('lost', lambda: self.inbox.append(gone))
        self.after(self.draw.expovariate(1 / 3.0), self._accident)

    def _heal(self) -> None:
        """After the accidents, a job one of whose nodes is dead is ended by its scheduler."""
        for job in self.jobs.values():
            if any(not node.alive for node in job.members):
                self.take_block(job)

    def kill(self, node: Node) -> None:
        """A node dies; its scheduler ends the job later, or never."""
        node.alive = False
        if (member := node.busy) is not None:
            member.over = True
            self.arrives('lost', lambda: self.inbox.append(MemberDisconnected(*member.key)))
            self.after(self.draw.uniform(4, 8), lambda: member.returns(ManagerLost(b'', 'it')))
            member.lost_by_others()
        if self.draw.random() < 0.5:
            self.after(self.draw.uniform(1, 10), lambda: self.take_block(self.jobs[node.block]))

    def take_block(self, job: Job) -> None:
        if job.state in (JobState.PENDING, JobState.RUNNING):
            job.state = JobState.TIMEOUT
            self.end_nodes(job)

    def end_nodes(self, job: Job) -> None:
        for node in job.members:
            if node.alive:
                node.alive = False
                if node.busy is not None:
                    node.busy.over = True
                    node.busy.lost_by_others()


class Member:
    """One node's share of a fragment; rank 0 trains for all."""

    def __init__(
        self, world: World, key: tuple[str, int, int], nodes: int, node: Node, done: Future[Any]
    ) -> None:
        self.world, self.key, self.count, self.node, self.done = world, key, nodes, node, done
        self.over = self.known = self.stops = False
        self.samples = 0
        world.members[key] = self
        node.busy = self
        self.say(msg.Hello(node.name))
        world.after(0.1 if world.stay_s else world.draw.uniform(0.3, 1.0), self._begin)
        world.after(1.0, self._alive)

    @property
    def others(self) -> list[Member]:
        name, number, _ = self.key
        found = (self.world.members.get((name, number, m)) for m in range(self.count))
        return [member for member in found if member is not None]

    def say(self, message: msg.MemberMessage) -> None:
        said = msg.FromMember(*self.key, message)
        if self.node.alive:
            self.known = True
            self.world.arrives(self.key, lambda: self.world.inbox.append(said))

    def hear(self, message: msg.ToMember) -> None:
        if self.over or not self.node.alive:
            return
        if isinstance(message, msg.StopTraining):
            self.stops = True
        elif isinstance(message, msg.Abandon):
            self._end('peer-lost')
        elif isinstance(message, msg.StartStandby):
            self.world.after(0.5, partial(self.say, msg.StandbyReady()))
        elif isinstance(message, msg.AreYouThere):
            self._unless_silent(lambda: self.say(msg.Alive()))

    def _unless_silent(self, do: Callable[[], None]) -> None:
        """What is stopped does it when it goes on."""
        wait_s = self.node.silent_until - self.world.now
        self.world.after(wait_s, do) if wait_s > 0 else do()

    def _alive(self) -> None:
        if not self.over and self.node.alive:
            if self.node.silent_until <= self.world.now:
                self.say(msg.Alive())
            self.world.after(1.0, self._alive)

    def _begin(self) -> None:
        """Rank 0 begins when all are there; whoever waits for long has lost touch."""
        if self.over or not self.node.alive or self.key[2] > 0:
            return
        ready = len(self.others) == self.count and not any(m.over for m in self.others)
        if not ready or self.node.silent_until > self.world.now:
            self.world.after(0.5, self._begin)
            return
        name, number, _ = self.key
        self.samples = self.world.stores[name].begin(number)
        self.say(ev.FragmentStarted(0.0, name, number, self.samples))
        self.world.after(0.5, lambda: self._step(0))

    def _step(self, count: int) -> None:
        if self.over or not self.node.alive:
            return
        if self.node.silent_until > self.world.now or any(
            m.node.silent_until > self.world.now for m in self.others
        ):
            self.world.after(0.5, lambda: self._step(count))
            return
        name, number, _ = self.key
        total = self.world.totals[name]
        self.samples = min(total, self.samples + int(0.5 * RATE * self.count))
        self.say(ev.FragmentProgressed(0.0, name, number, self.samples, RATE * self.count))
        finished = self.samples >= total
        if (finished or self.stops or count % 4 == 3) and not self._save():
            self._all('fenced')
        elif finished or self.stops:
            self._all('finished' if finished else 'stopped')
        else:
            self.world.after(0.5, lambda: self._step(count + 1))

    def _save(self) -> bool:
        name, number, _ = self.key
        if not self.world.stores[name].commit(self.samples, number):
            return False
        path = f'/store/{self.samples}-{number}'
        self.say(ev.CheckpointSaved(0.0, Checkpoint(name, path, self.samples, number)))
        return True

    def _all(self, how: msg.RankEnd) -> None:
        for member in self.others:
            delay = self.world.draw.uniform(0, 0.2) if member is not self else 0.0
            self.world.after(delay, partial(member._end, how))

    def crash(self) -> None:
        """One of its ranks dies without a word."""
        if not self.over:
            self.over = True
            self.say(msg.RankEnded(self.key[2], ok=False, died=True))
            self._unless_silent(lambda: self.returns([RankResult(self.key[2], '', '', status=-9)]))
            self.lost_by_others()

    def lost_by_others(self) -> None:
        """The other ranks notice by their connections, at the latest after 0.6 ``hang_s``."""
        for member in self.others:
            if member is not self:
                delay = self.world.draw.uniform(0, 0.6 * TIMEOUTS.hang_s)
                self.world.after(delay, partial(member._end, 'peer-lost'))

    def _end(self, how: msg.RankEnd) -> None:
        if not self.over and self.node.alive:
            self._unless_silent(lambda: self._ended(how))

    def _ended(self, how: msg.RankEnd) -> None:
        if self.over or not self.node.alive:
            return
        self.over = True
        rank, ok = self.key[2], how in ('finished', 'stopped')
        self.say(msg.RankEnded(rank, ok))
        path = f'/store/{self.samples}-{self.key[1]}' if rank == 0 and ok else None
        outcome = msg.Outcome(how, self.samples if rank == 0 else 0, path)
        self.returns([RankResult(rank, self.node.name, '', outcome)])

    def returns(self, result: Any) -> None:
        """Its task comes back, and the worker takes the next one."""
        if self.node.busy is self:
            self.node.busy = None
            self.node.next()

        def come() -> None:
            if not self.done.done():
                if isinstance(result, BaseException):
                    self.done.set_exception(result)
                else:
                    self.done.set_result(result)

        if self.node.alive or isinstance(result, BaseException):
            self.world.arrives(('result', self.key), come, once=True)


class Control:
    """In place of the control channel."""

    def __init__(self, world: World) -> None:
        self._world = world

    def post(self, item: Any) -> None:
        self._world.posted.append(item)

    def receive(self, timeout_s: float) -> Iterator[Any]:
        self._world.pass_time(max(0.0, timeout_s))
        items = [*self._world.inbox, *self._world.posted]
        self._world.inbox.clear()
        self._world.posted.clear()
        return iter(items)

    def send(self, key: tuple[str, int, int], message: msg.ToMember) -> bool:
        member = self._world.members.get(key)
        if member is None or not member.known:
            return False
        self._world.arrives(('to', key), lambda: member.hear(message))
        return True

    def forget(self, trainer: str, fragment: int) -> None:
        pass


class Parsl:
    """In place of Parsl's interchange and managers."""

    def __init__(self, world: World) -> None:
        self._world, self._blocks = world, 0

    def open(self, request: BlockRequest) -> tuple[str, str]:
        world = self._world
        if not world.calm and world.draw.random() < 0.1:
            raise FreeTrainError('the scheduler refuses')
        self._blocks += 1
        name = f'b{self._blocks}'
        job = world.jobs[name] = Job(name, request.nodes)
        world.after(
            world.draw.uniform(0.1, 0.2 if world.stay_s else 3.0), lambda: self._starts(job)
        )
        return name, name

    def _starts(self, job: Job) -> None:
        world = self._world
        if job.state is not JobState.PENDING:
            return
        job.state = JobState.RUNNING
        if not world.calm and (world.stay_s or world.draw.random() < 0.5):
            job.until = world.now + (world.stay_s or world.draw.uniform(5, 40))
            world.after(job.until - world.now, lambda: world.take_block(job))
        for n in range(job.nodes):
            node = Node(f'{job.name}n{n}', job.name)
            never = not world.calm and world.draw.random() < 0.05
            delay = 0.1 if world.at_once else world.draw.uniform(0.1, 4.0)
            delay = math.inf if never else delay
            job.members.append(node)
            if delay < math.inf:
                world.after(delay, lambda one=node: world.nodes.update({one.name: one}))  # type: ignore[misc]

    def managers(self) -> list[dict[str, Any]]:
        return [
            {'manager': n.name, 'block_id': n.block, 'active': True}
            for n in self._world.nodes.values()
            if n.alive
        ]

    def submit(self, context: dict[str, Any], buffer: bytes) -> Future[Any]:
        world, done = self._world, Future[Any]()
        node = world.nodes.get(context['resource_spec'][PIN])
        hook = context['task_executor']['f'].rpartition('.')[2]
        if node is None or hook == 'leave':
            return done
        if hook == 'greet':
            answer = Greeting(node.name, 0)
            if world.calm or world.draw.random() > 0.05:  # else the worker never answers
                greet = partial(self._answers, node, done, answer)
                work = partial(node.after_the_others, greet)
                world.arrives(('task', node.name), work, once=True)
            return done
        order = context['task_executor']['a'][0]
        if order.ahead_s is not None:
            work = partial(node.after_the_others, partial(self._answers, node, done, []))
        else:
            key = (order.fragment.trainer, order.fragment.fragment, order.member)
            member = partial(Member, world, key, order.members, node, done)
            work = partial(node.after_the_others, member)
        world.arrives(('task', node.name), work, once=True)
        return done

    def _answers(self, node: Node, done: Future[Any], answer: Any) -> None:
        """A task that is over at once."""

        def come() -> None:
            if node.alive and not done.done():
                done.set_result(answer)

        self._world.arrives(('answer', node.name), come, once=True)
        node.next()

    def end_manager(self, name: str) -> None:
        pass

    def statuses(self) -> dict[str, JobStatus]:
        silent = not self._world.calm and self._world.draw.random() < 0.1
        return {
            name: JobStatus(JobState.UNKNOWN if silent else self._world.jobs[name].state)
            for name in self._world.blocks.blocks
        }

    def trouble(self) -> str:
        return ''


class Provider:
    """In place of a site and its provider."""

    script_dir = '/scripts'

    def __init__(self, world: World) -> None:
        self._world = world
        self.site = SimpleNamespace(
            poll_s=0.2 if world.stay_s else 1.0,
            gone=lambda job: None,
            offers=lambda since, until: (),
            is_local=False,
        )

    def holes(self) -> tuple[Hole, ...]:
        live = (JobState.PENDING, JobState.RUNNING)
        used = sum(job.nodes for job in self._world.jobs.values() if job.state in live)
        left = self._world.size - used
        left = min(left, 1) if self._world.stay_s and not self._world.calm else left
        return (Hole(left),) if left > 0 else ()

    def end_of(self, job: str) -> float | None:
        until = self._world.jobs[job].until
        return None if until == math.inf else until

    def cancel(self, jobs: Sequence[str]) -> list[bool]:
        done = []
        for name in jobs:
            done.append(self._world.calm or self._world.draw.random() > 0.1)
            job = self._world.jobs[name]
            if done[-1] and job.state in (JobState.PENDING, JobState.RUNNING):
                job.state = JobState.CANCELLED
                self._world.end_nodes(job)
        return done

    def release(self, job: str, nodes: Sequence[str]) -> None:
        raise FreeTrainError('it cannot shrink jobs')


__all__ = ['FRAGMENT', 'World']
