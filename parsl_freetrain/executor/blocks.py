"""Blocks and their nodes: opened, polled, greeted, given back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from parsl.executors.high_throughput.errors import ManagerLost
from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.words import BlockRequest
from parsl_freetrain.executor.adoption import AdoptedBlock
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.ledger.store import Ledger
from parsl_freetrain.sites.protocols import HoleGone
from parsl_freetrain.sites.provider import BackfillProvider

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 300.0
HOPELESS_GREETINGS = 3


@dataclass
class OpenBlock:
    """A block that has not ended; nodes by manager id."""

    job_id: str
    request: BlockRequest
    until_s: float | None = None
    greeting: set[str] = field(default_factory=set)
    nodes: dict[str, str] = field(default_factory=dict)
    unusable: set[str] = field(default_factory=set)
    noticed: bool = False   # the scheduler has told its nodes that they go

    def complete(self) -> bool:
        return len(self.nodes) + len(self.unusable) >= self.request.nodes


class BlockKeeper:
    """Carries out OpenBlock and CloseBlock, and tells which nodes come and go.

    Parameters
    ----------
    provider
        The site's provider.
    launch
        Opens a block for a request through Parsl and returns (block id, job id); raises what the site raised.
    managers
        Parsl's list of connected managers.
    submit
        Sends one payload to the interchange.
    report
        Takes (block, manager, future) when a node's greeting has come back; called from Parsl's thread.
    template
        Name of the warm parent of this computer that forks the nodes' ones, if nodes are processes of this computer.
    """

    def __init__(self, provider: BackfillProvider, ledger: Ledger, warm_log_dir: str, launch: Callable[[BlockRequest], tuple[str, str]],
                 managers: Callable[[], list[dict[str, Any]]], submit: Callable[[dict[str, Any], bytes], Future[Any]],
                 report: Callable[[str, str, Future[Any]], None], template: str | None = None) -> None:
        self._provider = provider
        self._ledger = ledger
        self._warm_log_dir = warm_log_dir
        self._launch = launch
        self._managers = managers
        self._submit = submit
        self._report = report
        self._template = template
        self.blocks: dict[str, OpenBlock] = {}
        self._not_before = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._refusals: list[str] = []
        self._ever_joined = False

    def open(self, request: BlockRequest, at: float) -> list[ev.Event]:
        """Submit a block; after a refusal nothing is submitted for a while, twice as long each time."""
        if at < self._not_before:
            return []
        try:
            block, job_id = self._launch(request)
        except HoleGone:
            return []
        except Exception as error:
            self._back_off(at)
            logger.warning('A block of %d nodes was refused, next try in %.0f s: %s', request.nodes, self._not_before - at, error)
            self._ledger.event(at=at, kind='BlockRefused', detail={
                'nodes': request.nodes, 'next_try_s': self._not_before - at, 'error': str(error)})
            return []
        return self.adopt(AdoptedBlock(block, job_id, request), at)

    def adopt(self, adopted: AdoptedBlock, at: float) -> list[ev.Event]:
        """A block that is there: just submitted, or left by an earlier run."""
        block, request = adopted.block, adopted.request
        self.blocks[block] = OpenBlock(adopted.job_id, request)
        self._ledger.block_opened(block, at=at, job_id=adopted.job_id, nodes=request.nodes, walltime_s=request.walltime_s,
                                  names=request.names)
        return [ev.BlockOpened(at, block, request)]

    def _back_off(self, at: float) -> None:
        self._not_before, self._backoff_s = at + self._backoff_s, min(2 * self._backoff_s, LONGEST_BACKOFF_S)

    def close(self, block: str, at: float) -> list[ev.Event]:
        """Give a block back."""
        if block not in self.blocks:
            return []
        self._provider.cancel([self.blocks[block].job_id])
        return self._ended(block, 'returned', at)

    def holes(self, at: float) -> list[ev.Event]:
        """What the site offers now."""
        return [ev.HolesSeen(at, self._provider.holes())]

    def starting(self) -> bool:
        """Whether nodes are expected that have not been greeted."""
        return any(not block.complete() for block in self.blocks.values())

    def greet_new(self, at: float) -> None:
        """Greet managers that have registered since the last call."""
        for manager in self._managers():
            block = self.blocks.get(manager['block_id'])
            name = manager['manager']
            if block is None or name in block.greeting or not manager['active']:
                continue
            block.greeting.add(name)
            greeting = self._submit({
                'resource_spec': {PIN: name},
                'task_executor': {'f': 'parsl_freetrain.executor.member.greet', 'a': (self._warm_log_dir, 120.0, self._template)},
            }, b'')
            greeting.add_done_callback(lambda done, b=manager['block_id'], m=name: self._report(b, m, done))  # type: ignore[misc]

    def greeted(self, block_id: str, manager: str, done: Future[Any], at: float) -> tuple[list[ev.Event], str]:
        """A greeting has come back: the node joins, or cannot be used. The second value says why nodes of this site never will."""
        block = self.blocks.get(block_id)
        if block is None:
            return [], ''
        error = done.exception()
        if error is not None:
            block.unusable.add(manager)
            logger.warning('Node %s of block %s cannot be used: %s', manager, block_id, error)
            self._ledger.event(at=at, kind='NodeUnusable', block=block_id, node=manager, detail={'error': str(error)})
            self._refusals.append(f'{type(error).__name__}: {error}')
            events = self._useless(block_id, at) if block.complete() and not block.nodes else []
            if self._ever_joined or isinstance(error, ManagerLost) or len(self._refusals) < HOPELESS_GREETINGS:
                return events, ''
            return events, f'the first {len(self._refusals)} nodes could not be used; the last one said {self._refusals[-1]}'
        self._ever_joined = True
        self._backoff_s = FIRST_BACKOFF_S
        block.nodes[manager] = done.result()['name']
        if not block.noticed:
            block.until_s = self._provider.end_of(block.job_id)
        self._ledger.node_joined(manager, at=at, block=block_id, name=block.nodes[manager])
        return [ev.NodesJoined(at, block_id, (manager,), block.until_s)], ''

    def _useless(self, block_id: str, at: float) -> list[ev.Event]:
        """None of a block's nodes can be used: give it back, and don't ask for the next one at once."""
        self._back_off(at)
        return self.close(block_id, at)

    def poll(self, statuses: dict[str, JobStatus], at: float) -> list[ev.Event]:
        """Compare with the batch system's answer; a block whose state is unknown is left as it was."""
        events: list[ev.Event] = []
        for block_id, block in list(self.blocks.items()):
            status = statuses.get(block_id)
            if status is not None and status.terminal:
                if status.state is JobState.CANCELLED:
                    self._back_off(at)  # it waited for nothing, or somebody does not want it: don't ask for the next one at once
                elif status.state in (JobState.FAILED, JobState.COMPLETED) and not block.nodes:
                    self._back_off(at)  # it was not taken, it ended by itself before a node was ready: more of the same would not help
                    logger.warning('Block %s ended before any of its nodes was ready: %s', block_id, status)
                taken = block.noticed or block.until_s is None or at < block.until_s
                how = 'cancelled' if status.state is JobState.CANCELLED else 'taken' if taken else 'expired'
                events += self._ended(block_id, how, at)
                continue
            if status is not None and status.state is JobState.PENDING and (block.nodes or block.unusable):
                events += self._requeued(block_id, block, at)
            until_s = block.until_s if block.noticed else self._provider.end_of(block.job_id)
            if until_s != block.until_s:
                block.until_s = until_s
                self._ledger.block_until(block_id, until=until_s)
                events.append(ev.BlockEndKnown(at, block_id, until_s))
        return events

    def _requeued(self, block_id: str, block: OpenBlock, at: float) -> list[ev.Event]:
        """A block that had nodes waits in the queue again: they are gone, and others will come."""
        gone = tuple(block.nodes)
        for node in gone:
            self._ledger.node_left(node, at=at, how='taken')
        block.nodes.clear()
        block.unusable.clear()
        block.noticed = False
        return [ev.NodesLeft(at, gone)] if gone else []

    def noticed(self, node: str, at: float) -> list[ev.Event]:
        """The scheduler has sent a node its notice: the block counts as at its end, so that nothing starts on it any more."""
        for block_id, block in self.blocks.items():
            if node in block.nodes and not block.noticed:
                block.noticed, block.until_s = True, at
                self._ledger.block_until(block_id, until=at)
                return [ev.BlockEndKnown(at, block_id, at)]
        return []

    def lose(self, nodes: set[str], at: float) -> None:
        """Nodes that do not answer any more, though their block goes on."""
        for block in self.blocks.values():
            for node in nodes & set(block.nodes):
                del block.nodes[node]
                block.unusable.add(node)
                self._ledger.node_left(node, at=at, how='lost')

    def _ended(self, block_id: str, how: str, at: float) -> list[ev.Event]:
        block = self.blocks.pop(block_id)
        self._provider.site.gone(block.job_id)
        for node in block.nodes:
            self._ledger.node_left(node, at=at, how=how)
        self._ledger.block_closed(block_id, at=at, how=how)
        return [ev.BlockClosed(at, block_id)]
