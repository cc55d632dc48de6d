"""Opens, polls and gives back blocks, and greets their nodes."""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from parsl.executors.high_throughput.errors import ManagerLost
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import FreeTrainError, nodes_text
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block import block_record
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.worker_tasks import Greeting
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.host.clocks import Backoff, NodeClocks, RunClock
from parsl_freetrain.sites.batch.life import ran_out_of_memory
from parsl_freetrain.sites.protocols import HoleGone, Yielding
from parsl_freetrain.sites.provider import BackfillProvider

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 300.0
HOPELESS_GREETINGS = 3
EQUAL_FAILURES = 3
AVOID_S = 600.0  # a node with a broken device is not used for so long


class GreetingReturned(NamedTuple):
    block: str
    manager: str
    done: Future[Greeting]


class BlockManager:
    """Opens and closes blocks, emits their changes; ``template`` forks nodes' fork servers."""

    def __init__(
        self,
        provider: BackfillProvider,
        stream: Stream,
        inbox: ControlServer,
        node_log_dir: str,
        parsl: ParslSide,
        template: str | None = None,
        join_s: float = math.inf,
        clock: RunClock | None = None,
        logs: block_record.BlockLogs | None = None,
    ) -> None:
        self._logs = logs
        self._provider, self._stream, self._inbox = provider, stream, inbox
        self._node_log_dir, self._parsl, self._template = node_log_dir, parsl, template
        self._join_s = join_s
        self.blocks: dict[str, block_record.BlockRecord] = {}
        self._clock = clock or RunClock()
        self._node_clocks = NodeClocks()
        self.leaving = block_record.LeavingJobs(provider, parsl, self._clock)
        self._not_before = 0.0
        self._backoff = Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        self._refusals: list[str] = []
        self._useless = 0  # blocks in a row that ended by themselves before any node was ready
        self._ever_joined = False
        self._avoided: dict[str, tuple[float, str]] = {}  # by host name: until when, and why

    def open(self, request: BlockRequest, at: float) -> None:
        """Submit a block; after a refusal nothing for a while, twice as long each time."""
        if at < self._not_before:
            return
        request = replace(request, avoid=tuple(sorted(self._avoided_at(at))))
        try:
            block, job_id = self._parsl.open(request)
        except HoleGone:
            return
        except Exception as error:
            self._not_before = at + self._backoff.failed()
            next_try_s = self._not_before - at
            said = 'A block of %s was refused, next try in %.0f s: %s'
            logger.warning(said, nodes_text(request.nodes), next_try_s, error)
            self._stream.emit(ev.BlockRefused(at, request.nodes, next_try_s, str(error)))
            return
        self.adopt(AdoptedBlock(block, job_id, request), at)

    def adopt(self, adopted: AdoptedBlock, at: float) -> None:
        block, request = adopted.block, adopted.request
        self.blocks[block] = block_record.BlockRecord(adopted.job_id, request, waited_at=at)
        self._stream.emit(ev.BlockOpened(at, block, request, adopted.job_id))

    def close(self, names: Iterable[str], at: float) -> None:
        closing = [name for name in names if name in self.blocks]
        self.leaving.end([self.blocks[name] for name in closing], at)
        for name in closing:
            self._ended(name, 'returned', at)

    def result_arrived(self, node: str) -> None:
        """Handle that a node has nothing more to say: if the scheduler takes it, it can end."""
        if any(block.noticed and node in block.nodes for block in self.blocks.values()):
            self.leaving.tell(node)

    def look_for_needs(self, at: float) -> None:
        """Emit which waiting jobs of others need nodes of blocks, if any does."""
        if not isinstance(self._provider.site, Yielding):
            return
        demands, held = self._provider.site.needed()
        if demands:
            self._stream.emit(block_record.nodes_needed(at, demands, held, self.blocks))

    def release(self, block_id: str, nodes: Sequence[str], at: float) -> None:
        """Give some nodes of a block back. If the scheduler refuses, they can be used again."""
        block = self.blocks.get(block_id)
        if block is None:
            return
        host = {manager: host for host, manager in block.managers.items()}
        leave = [host.get(node) or node.partition(' ')[2] for node in nodes]
        gone = tuple(node for node in nodes if node in block.nodes)
        try:
            self._provider.release(block.job_id, leave)
        except FreeTrainError as error:
            logger.warning('Block %s keeps its nodes: %s', block_id, error)
            self._stream.emit(ev.NodesLeft(at, gone, 'returned'), block.joined(at, block_id, gone))
            return
        block.request = replace(block.request, nodes=block.request.nodes - len(leave))
        for node in gone:
            del block.nodes[node]
        self._emit_gone(gone, 'returned', at)

    def look_for_holes(self, at: float) -> None:
        avoided = self._avoided_at(at)
        holes = []
        for hole in self._provider.holes():
            names = tuple(name for name in hole.names if name not in avoided)
            if names or not hole.names:
                until_s, count = self._clock.of_wall(hole.until_s), len(names) or hole.nodes
                holes.append(replace(hole, nodes=count, names=names, until_s=until_s))
        self._stream.emit(ev.HolesSeen(at, tuple(holes)))

    def starting(self) -> bool:
        """Whether there are nodes to come that have not been greeted."""
        return any(not block.complete() for block in self.blocks.values())

    def answering(self) -> int:
        """Number of nodes that have been sent their first task and have not answered."""
        return sum(len(block.answering) for block in self.blocks.values())

    def greet_new(self) -> None:
        """Send a first task to new managers, and end those without a block or its nodes."""
        for manager in self._parsl.managers():
            block_id, name = manager['block_id'], manager['manager']
            block = self.blocks.get(block_id)
            if not manager['active']:
                continue
            if block is None or name in block.left:
                self._parsl.end_manager(name)
                continue
            if name in block.greeted:
                continue
            block.greeted.add(name)
            block.answering[name] = self._clock()
            greeted = self._parsl.submit(
                block_record.greeting(name, self._node_log_dir, self._template), b''
            )
            greeted.add_done_callback(
                lambda done, b=block_id, m=name: self._inbox.post(GreetingReturned(b, m, done))  # type: ignore[misc]
            )

    def greeted(self, block_id: str, manager: str, done: Future[Greeting], at: float) -> str:
        """A node's first task is back: it joins, or is unusable; why no node can be used."""
        block = self.blocks.get(block_id)
        if block is None or manager in block.left:  # answered just before its node was taken
            return ''
        sent_at = block.answering.pop(manager, at)
        error = done.exception()
        if error is not None:
            return self._unusable(block_id, manager, error, at)
        self._ever_joined = True
        node, name = done.result(), done.result().name
        self._node_clocks.measured(name, sent_at, node.clock, at)
        until_s, why = self._avoided.get(name, (0.0, ''))
        if at < until_s:
            return self._unusable(block_id, manager, FreeTrainError(why), at)
        self._backoff.reset()
        block.unusable.discard(manager)
        self._useless = 0
        block.nodes[manager], block.managers[name] = name, manager
        block.heard_at = at
        if not block.noticed:
            block.until_s = self._end_of(block)
        joined = block.joined(at, block_id, (manager,), (node.devices,))
        self._stream.emit(*block.start(block_id, at), joined)
        return ''

    def _unusable(self, block_id: str, manager: str, error: BaseException, at: float) -> str:
        block = self.blocks[block_id]
        block.unusable.add(manager)
        block.heard_at = at
        logger.warning('Node %s of block %s cannot be used: %s', manager, block_id, error)
        self._stream.emit(ev.NodeUnusable(at, block_id, manager, str(error)))
        self._refusals.append(f'{type(error).__name__}: {error}')
        if block.complete() and not block.nodes:
            # the next block of this site would probably fail too
            self._not_before = at + self._backoff.failed()
            self.close([block_id], at)
        if (
            self._ever_joined
            or isinstance(error, ManagerLost | TimeoutError)
            or len(self._refusals) < HOPELESS_GREETINGS
        ):
            return ''
        return (
            f'the first {len(self._refusals)} nodes could not be used; the last one '
            f'said {self._refusals[-1]}'
        )

    def poll(self, statuses: dict[str, JobStatus], at: float) -> None:
        """Compare with the batch system; greet again lost nodes whose managers are connected."""
        if any(block.unusable - block.greeted for block in self.blocks.values()):
            self.greet_new()
        asked_at = self._clock.of_wall(getattr(self._provider.site, 'asked_at', None))
        for block_id, block in list(self.blocks.items()):
            status = statuses.get(block_id)
            self._stream.emit(*block.look(block_id, status, at))
            if status is not None and status.terminal:
                self._over(block_id, status, at)
                continue
            if block.silent_s(at) > self._join_s:
                self._give_up(block_id, at)
                continue
            self._give_up_silent(block_id, block, at)
            if block_id not in self.blocks:
                continue
            waits = status is not None and status.state in (JobState.PENDING, JobState.HELD)
            # It may have waited when that was asked, and started since.
            newer = asked_at is None or asked_at > block.heard_at
            if waits and newer and (block.nodes or block.unusable):
                self._requeued(block_id, at)
            until_s = block.until_s if block.noticed else self._end_of(block)
            if until_s != block.until_s:
                block.until_s = until_s
                self._stream.emit(ev.BlockEndKnown(at, block_id, until_s))

    def _end_of(self, block: block_record.BlockRecord) -> float | None:
        return self._clock.of_wall(self._provider.end_of(block.job_id))

    def _over(self, block_id: str, status: JobStatus, at: float) -> None:
        block = self.blocks[block_id]
        if status.state is JobState.CANCELLED:
            # It waited in vain, or somebody cancelled it: do not request another one at once.
            self._not_before = at + self._backoff.failed()
            how = 'cancelled'
        elif ran_out_of_memory(status) and block.nodes:
            how = ev.OUT_OF_MEMORY
        else:
            if status.state in (JobState.FAILED, JobState.COMPLETED) and not block.nodes:
                # The block was not taken but ended by itself; another one would not help.
                self._ended_useless(block_id, status, at)
            taken = block.noticed or block.until_s is None or at < block.until_s
            how = 'taken' if taken else 'expired'
        self._ended(block_id, how, at)

    def _ended_useless(self, block_id: str, status: JobStatus, at: float) -> None:
        self._not_before = at + self._backoff.failed()
        self._useless += 1
        logger.warning('Block %s ended before any of its nodes was ready: %s', block_id, status)
        if self._useless >= EQUAL_FAILURES:
            why = (
                f'the last {self._useless} blocks ended by themselves before any of their nodes '
                f'was ready; the reason is in the output of the last one: {status.message}'
            )
            self._complain(block_id, why, at)

    def _give_up(self, block_id: str, at: float) -> None:
        """Give a block back that runs and whose nodes say nothing: nobody could use them."""
        self._not_before = at + self._backoff.failed()
        why = (
            f'no node of block {block_id} has joined within {self._join_s:g} s of its start, so it '
            f'was given back; what its nodes have printed is in {self._provider.script_dir}'
        )
        self._complain(block_id, why, at)
        self.close([block_id], at)

    def _complain(self, block_id: str, why: str, at: float) -> None:
        logger.error('%s', why)
        nodes = self.blocks[block_id].request.nodes
        self._stream.emit(ev.BlockRefused(at, nodes, self._not_before - at, why))

    def _give_up_silent(self, block_id: str, block: block_record.BlockRecord, at: float) -> None:
        """Count nodes as unusable whose first task does not return; it may do so later."""
        for manager in [m for m, sent in block.answering.items() if at - sent > self._join_s]:
            del block.answering[manager]
            if block_id not in self.blocks:  # the one before was its last
                continue
            why = f'its worker has not answered its first task within {self._join_s:g} s'
            self._unusable(block_id, manager, TimeoutError(why), at)

    def _requeued(self, block_id: str, at: float) -> None:
        """Handle a block that is queued again: its nodes are gone, and others will come."""
        block = self.blocks[block_id]
        gone = tuple(block.nodes)
        block.requeue()
        self._emit_gone(gone, 'taken', at)
        self._stream.emit(ev.BlockRequeued(at, block_id))
        self._end_managers(block.left)

    def noticed(self, node: str, at: float) -> None:
        """The scheduler's notice to a node: its block is over, nothing more starts on it."""
        for block_id, block in self.blocks.items():
            if node in block.nodes and not block.noticed:
                block.noticed, block.until_s = True, at
                self._stream.emit(ev.BlockEndKnown(at, block_id, at))

    def lose(self, nodes: Collection[str], at: float) -> None:
        """Handle nodes that no longer answer although their block continues."""
        for block in self.blocks.values():
            lost = tuple(node for node in block.nodes if node in nodes)
            for node in lost:
                del block.nodes[node]
                block.unusable.add(node)
                block.greeted.discard(node)  # it may come back
            self._emit_gone(lost, 'lost', at)

    def avoid(self, node: str, why: str, at: float) -> None:
        """Do not use a node for :data:`AVOID_S`, in no block, since a device of it is broken."""
        for block_id, block in self.blocks.items():
            if node in block.nodes:
                self._avoided[block.nodes[node]] = at + AVOID_S, why
                logger.warning('Node %s is not used for %g s: %s', node, AVOID_S, why)
                self.lose({node}, at)
                self._stream.emit(ev.NodeUnusable(at, block_id, node, why))
                if block.complete() and not block.nodes:
                    self.close([block_id], at)
                return

    def _avoided_at(self, at: float) -> set[str]:
        return {name for name, (until_s, _) in self._avoided.items() if at < until_s}

    def _emit_gone(self, nodes: tuple[str, ...], how: str, at: float) -> None:
        # The controller must hear of lost nodes before it hears of the ends of their fragments.
        if nodes:
            self._stream.emit(ev.NodesLeft(at, nodes, how))

    def _ended(self, block_id: str, how: str, at: float) -> None:
        block = self.blocks.pop(block_id)
        self._provider.site.gone(block.job_id)
        self._emit_gone(tuple(block.nodes), how, at)
        self._stream.emit(ev.BlockClosed(at, block_id, how))
        self._end_managers(block.greeted)
        if self._logs is not None:
            self._logs.ended(block_id, block.greeted)

    def _end_managers(self, names: Collection[str]) -> None:
        for manager in self._parsl.managers() if names else ():
            if manager['active'] and manager['manager'] in names:
                self._parsl.end_manager(manager['manager'])
