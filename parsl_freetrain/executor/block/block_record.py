"""What is kept of a block; its nodes' first and last task, and their leaving; and old logs."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus

from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.core.model.events import BlockStarted, NodesJoined, NodesNeeded
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, NodeDemand
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.host.clocks import Backoff
from parsl_freetrain.sites.protocols import Yielding
from parsl_freetrain.sites.provider import BackfillProvider


@dataclass
class BlockRecord:
    job_id: str
    request: BlockRequest
    until_s: float | None = None  #: its end in seconds since the epoch; None if unknown
    greeted: set[str] = field(default_factory=set)  #: managers that were sent a first task
    #: Greeted managers whose first task has not returned, and when it was sent.
    answering: dict[str, float] = field(default_factory=dict)
    #: Host names of the ready nodes, by manager id.
    nodes: dict[str, str] = field(default_factory=dict)
    #: Managers whose first task failed, or that were lost.
    unusable: set[str] = field(default_factory=set)
    #: Managers that had nodes which the scheduler has taken.
    left: set[str] = field(default_factory=set)
    noticed: bool = False  #: whether the scheduler has notified its nodes of their end
    #: The manager of each node that was ever ready, by host name.
    managers: dict[str, str] = field(default_factory=dict)
    waited_at: float = 0.0  #: when it was last known to wait for its nodes
    heard_at: float = 0.0  #: when one of its nodes last joined or could not be used
    started: bool = False  #: whether it has nodes now
    started_at: float = 0.0  #: when it was first known to have them

    def complete(self) -> bool:
        return len(self.nodes) + len(self.unusable) >= self.request.nodes

    def joined(
        self, at: float, name: str, nodes: tuple[str, ...], devices: tuple[int, ...] = ()
    ) -> NodesJoined:
        """The event that these nodes of it, which it has under its ``name``, are ready."""
        hosts = tuple(self.nodes[node] for node in nodes)
        return NodesJoined(at, name, nodes, self.until_s, self.request.node_class, hosts, devices)

    def requeue(self) -> None:
        """It waits in the queue again: its nodes are gone, and others will come."""
        self.left |= self.greeted
        self.nodes.clear()
        self.unusable.clear()
        self.answering.clear()
        self.noticed = self.started = False

    def start(self, name: str, at: float) -> list[BlockStarted]:
        """Note that it has nodes; return the events to emit under its ``name``."""
        if self.started:
            return []
        self.started, self.started_at = True, at
        return [BlockStarted(at, name, self.waited_at)]

    def silent_s(self, at: float) -> float:
        """Seconds since its start, if no node has joined and none may still do; else 0."""
        joined = any(manager not in self.left for manager in self.managers.values())
        return at - self.started_at if self.started and not (joined or self.answering) else 0.0

    def look(self, name: str, status: JobStatus | None, at: float) -> list[BlockStarted]:
        """Note whether it waits, by the batch system's answer; otherwise as :meth:`start`."""
        if status is None or status.state in (JobState.UNKNOWN, JobState.CANCELLED):
            return []  # a block that was withdrawn never had nodes
        if status.state not in (JobState.PENDING, JobState.HELD):
            return self.start(name, at)
        self.waited_at = at
        return []


def nodes_needed(
    at: float,
    demands: Iterable[NodeDemand],
    held: Iterable[BlockNodes],
    blocks: Mapping[str, BlockRecord],
) -> NodesNeeded:
    """The demands, with blocks and managers (or names of their own) for jobs and hosts."""
    of_job = {block.job_id: (name, block) for name, block in blocks.items()}
    known = [(*of_job[nodes.block], nodes) for nodes in held if nodes.block in of_job]
    manager: dict[str, str] = {}
    for name, block, nodes in known:
        manager |= {host: block.managers.get(host, f'{name} {host}') for host in nodes.nodes}

    def managers(hosts: frozenset[str]) -> frozenset[str]:
        return frozenset(manager[host] for host in hosts & manager.keys())

    asked = tuple(
        replace(d, among=managers(d.among), spare=managers(d.spare), first=managers(d.first))
        for d in demands
    )
    here = [(k, b, n, tuple(manager[host] for host in n.nodes)) for k, b, n in known]
    ours = (BlockNodes(k, m, managers(n.releasable), b.noticed) for k, b, n, m in here)
    return NodesNeeded(at, asked, tuple(ours))


LEAVE_S = 1.0  # seconds for the nodes of a block to end its job; then it is cancelled

AGAIN_S = 5.0
LONGEST_AGAIN_S = 30.0
"""Shortest and longest seconds until a failed cancel is repeated: the event loop waits for each."""


class LeavingJobs:
    """Ends the jobs of blocks that are given back. ``clock``: seconds since the epoch."""

    def __init__(
        self, provider: BackfillProvider, parsl: ParslSide, clock: Callable[[], float] = time.time
    ) -> None:
        self._provider, self._parsl, self._clock = provider, parsl, clock
        self._backoff = Backoff(AGAIN_S, LONGEST_AGAIN_S)
        self._until: dict[str, float] = {}  # by job id: then it is cancelled
        self._failed: set[str] = set()  # jobs that could not be cancelled: they may still run
        self._again = 0.0  # then this is tried again, with one command for all of them

    def tell(self, *managers: str) -> None:
        """Tell these nodes to end, where jobs of others may wait for them."""
        if isinstance(self._provider.site, Yielding):
            with suppress(TrainerFailed):  # the scheduler ends them
                for manager in managers:
                    self._parsl.submit(leaving(manager), b'')

    def end(self, blocks: Sequence[BlockRecord], at: float) -> None:
        """End the jobs of these blocks; one whose nodes have not all joined, at once."""
        for block in blocks:
            self.tell(*block.greeted)
        site = self._provider.site
        whole = [block for block in blocks if len(block.nodes) >= block.request.nodes]
        told = [block.job_id for block in whole if isinstance(site, Yielding)]
        if isinstance(site, Yielding) and told:
            site.leaving(told)
        ids = [block.job_id for block in blocks]
        self._until |= {job: at + LEAVE_S if job in told else at for job in ids}
        self.cancel(at)

    def cancel(self, at: float) -> None:
        """Cancel those that have had time to end, or failed before (``at`` infinite: all)."""
        late = [job_id for job_id, until in self._until.items() if until <= at]
        for job_id in late:
            del self._until[job_id]
        if at >= self._again:
            late += self._failed
        if not late:
            return
        cancelled = self._provider.cancel(late)
        over = {job_id for job_id, done in zip(late, cancelled, strict=True) if done}
        self._failed = (self._failed | set(late)) - over
        if all(cancelled):
            self._backoff.reset()
            self._again = at
        else:
            # Not from ``at`` on: the command itself may have taken long.
            self._again = self._clock() + self._backoff.failed()


_GREETING_S = 120.0


def greeting(manager: str, node_log_dir: str, template: str | None) -> dict[str, Any]:
    return _task(manager, 'greet', node_log_dir, _GREETING_S, template)


def leaving(manager: str) -> dict[str, Any]:
    return _task(manager, 'leave')


def _task(manager: str, function: str, *arguments: Any) -> dict[str, Any]:
    hook = {'f': f'parsl_freetrain.executor.fragment.worker_tasks.{function}', 'a': arguments}
    return {'resource_spec': {PIN: manager}, 'task_executor': hook}


NODES, BLOCKS = 1000, 20  # whose logs are kept (projects have quotas of files); blocks too


class BlockLogs:
    """Keeps what Parsl and scripts wrote about blocks; ``beside`` does work, or returns False."""

    def __init__(
        self,
        workers: str,
        nodes: str,
        scripts: Callable[[], str | None],
        beside: Callable[[Callable[[], object]], bool],
    ) -> None:
        self._workers, self._nodes, self._scripts, self._beside = workers, nodes, scripts, beside
        self._ended: deque[tuple[str, Collection[str]]] = deque()

    def ended(self, block: str, managers: Collection[str]) -> None:
        """Note a block that has ended, with the names of its nodes' managers."""
        self._ended.append((block, managers))
        kept = sum(1 + len(names) for _, names in self._ended)
        while len(self._ended) > BLOCKS and kept > NODES:
            first, names = self._ended[0]
            if not self._beside(lambda: self._remove(first, names)):  # noqa: B023  # done, or not
                return
            self._ended.popleft()
            kept -= 1 + len(names)

    def _remove(self, block: str, managers: Collection[str]) -> None:
        shutil.rmtree(Path(self._workers) / f'block-{block}', ignore_errors=True)
        old = [Path(self._nodes) / f'fork-server-{manager}.log' for manager in managers]
        for path in [*old, *Path(self._scripts() or os.devnull).glob(f'parsl.*.block-{block}.*')]:
            with suppress(OSError):
                path.unlink()
