"""The blocks of this process and what is known of each; it asks nothing itself."""

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parsl.jobs.states import JobStatus

from parsl_freetrain.core.model.errors import nodes_text
from parsl_freetrain.core.model.types import CORRECTED_S, BlockRequest
from parsl_freetrain.sites.batch import life
from parsl_freetrain.sites.batch.block_shape import Output, class_in
from parsl_freetrain.sites.batch.life import BlockLife, Seen, life_of
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import BatchJob, JobState

logger = logging.getLogger(__name__)

LEAST_STARTS = 3
ROUNDED_S = 2.0  # times in answers are whole seconds


@dataclass(frozen=True)
class BatchBlock:
    """A block that was submitted; times in seconds of ``time.time()``."""

    job_id: str
    nodes: int
    submitted_s: float
    start_by_s: float  #: if it has not started by then, it is withdrawn
    latest_end_s: float  #: by then it is certainly over, unless it runs and has a known end
    place: Output
    seen: Seen = field(default_factory=Seen)
    node_class: str = ''  #: of its nodes; empty: any
    needs_s: float = 0.0  #: how long its nodes must be free for the scheduler to start it

    @property
    def life(self) -> BlockLife:
        return life_of(self.seen)


class BlockTable:
    """The blocks by job id, in order of submission. It belongs to one thread at a time."""

    def __init__(self) -> None:
        self._blocks: dict[str, BatchBlock] = {}
        self._started_s: deque[float] = deque(maxlen=8)

    def start_s(self, assumed_s: float) -> float:
        """Seconds that it takes to start a job, by those that started, if less than was assumed."""
        enough = len(self._started_s) >= LEAST_STARTS
        return min(assumed_s, max(self._started_s) + ROUNDED_S) if enough else assumed_s

    def add(self, block: BatchBlock) -> None:
        self._blocks[block.job_id] = block

    def remove(self, job_id: str) -> bool:
        return self._blocks.pop(job_id, None) is not None

    def ids(self) -> frozenset[str]:
        return frozenset(self._blocks)

    def waiting(self) -> list[BatchBlock]:
        waiting = (BlockLife.PENDING, BlockLife.REQUEUED)
        return [block for block in self._blocks.values() if block.life in waiting]

    def _unstarted(self) -> list[BatchBlock]:
        """Those that have not begun, and are in the queue as far as is known."""
        return [
            b
            for b in self._blocks.values()
            if b.life is BlockLife.PENDING and not (b.seen.withdrawn or b.seen.missing)
        ]

    def late(self, now: float) -> list[str]:
        """Those to be withdrawn: they have not started in time, as far as is known."""
        return [b.job_id for b in self._unstarted() if now > b.start_by_s]

    def stranded(self, lengths_s: Collection[float], shortest_s: float, before: float) -> list[str]:
        """Those submitted ``before`` that need more or longer nodes than there are."""
        if not any(length >= shortest_s for length in lengths_s):
            return []
        return [
            b.job_id
            for b in self._unstarted()
            if b.seen.state is JobState.PENDING
            and b.submitted_s < before
            and sum(length >= b.needs_s for length in lengths_s) < b.nodes
        ]

    def taken(self, requeue: bool) -> list[str]:
        """Those to be deleted since their nodes were taken; ``requeue``: the requeued may wait."""
        lives = (BlockLife.SUSPENDED,) if requeue else (BlockLife.SUSPENDED, BlockLife.REQUEUED)
        return [
            b.job_id
            for b in self._blocks.values()
            if b.life in lives and not (b.seen.taken or b.seen.cancelled or b.seen.missing)
        ]

    def missing(self) -> dict[str, Output]:
        blocks = self._blocks.values()
        return {b.job_id: b.place for b in blocks if b.seen.missing and not life.is_over(b.life)}

    def end_of(self, job_id: str) -> float | None:
        """When the scheduler ends a block that has nodes, at the latest; None: never or unknown."""
        block = self._blocks.get(job_id)
        has_nodes = block is not None and block.life in (BlockLife.RUNNING, BlockLife.ENDING)
        return block.seen.end_s if block is not None and has_nodes else None

    def mark(self, job_ids: Iterable[str], **why: Any) -> None:
        """This process has ended these blocks, which are over when the scheduler says so. ``why``:
        one of ``cancelled``, ``withdrawn`` and ``taken``, of :class:`Seen`.
        """
        for job_id in job_ids:
            if block := self._blocks.get(job_id):
                self._see(block, replace(block.seen, **why))

    def take_in(self, jobs: Sequence[BatchJob], at: float) -> None:
        """The scheduler's answer to a question asked at this time."""
        known = {job.job_id: job for job in jobs}
        for job_id, block in list(self._blocks.items()):
            job, seen = known.get(job_id), block.seen
            if job is not None:
                running, pending = job.state is JobState.RUNNING, job.state is JobState.PENDING
                if running and not seen.ran and (job.start_s or 0.0) >= block.submitted_s - 1:
                    self._started_s.append((job.start_s or 0.0) - block.submitted_s)
                sooner = (job.end_s or math.inf) < (seen.end_s or 0.0) - CORRECTED_S
                seen = replace(
                    seen,
                    state=job.state,
                    end_s=job.end_s,
                    ran=seen.ran or running,
                    missing=0,
                    shortened=(seen.shortened and not pending) or (running and seen.ran and sooner),
                )
                self._see(block, seen)
            elif at > block.submitted_s and not life.is_over(block.life):
                self._see(block, replace(block.seen, missing=block.seen.missing + 1))

    def take_in_history(self, states: dict[str, JobState]) -> None:
        """What the accounting database says about jobs that the queue does not know."""
        for job_id, state in states.items():
            if block := self._blocks.get(job_id):
                missing = 0 if state.is_over else block.seen.missing
                self._see(block, replace(block.seen, state=state, missing=missing))

    def _see(self, block: BatchBlock, seen: Seen) -> None:
        changed = replace(block, seen=seen)
        if changed.life is not block.life:
            of = nodes_text(block.nodes)
            logger.info('Block %s of %s %s', block.job_id, of, changed.life.words)
        self._blocks[block.job_id] = changed

    def status(self, job_id: str, now: float, silence: str = '') -> JobStatus:
        """How a job is; ``silence`` says why the scheduler has not answered for long, if so."""
        block = self._blocks.get(job_id)
        if block is None:
            why = ': it is not a block of this process'
            return life.status_of(job_id, BlockLife.UNREACHABLE, why)
        # Where an adopted block writes is not known.
        out, err = block.place.stdout or None, block.place.stderr or None
        state, detail = block.life, ''
        if life.is_over(state):
            detail = f'; its output is in {out} and {err}' if out else ''
        elif life.forgotten(block.seen, block.latest_end_s, now):
            state = BlockLife.FORGOTTEN
        elif silence or block.seen.missing:
            state = BlockLife.UNREACHABLE
            detail = f': {silence or "the scheduler does not know it"}'
        return life.status_of(job_id, state, detail, out, err)


def block_from(job: BatchJob, options: BatchOptions, now: float) -> BatchBlock:
    """A job that was found, as if submitted now. Of one that waits, the deadline is not known."""
    start_by_s = now + options.withdraw_s
    running = job.state is JobState.RUNNING
    latest_s = job.end_s if running and job.end_s is not None else start_by_s + options.unplanned_s
    return replace(
        BatchBlock(job.job_id, job.nodes, now, start_by_s, latest_s, Output(job.name, '', '')),
        seen=Seen(job.state, job.end_s if running else None, running),
        node_class=class_in(job.name, options.classes),
    )


def request_from(job: BatchJob, options: BatchOptions, now: float) -> BlockRequest:
    """As if asked for now. Of a job that waits, the end is not known."""
    end_s = job.end_s if job.state is JobState.RUNNING else None
    left_s = None if end_s is None else max(0.0, end_s - now)
    node_class = class_in(job.name, options.classes)
    return BlockRequest(job.nodes, left_s, job.partition, node_class=node_class)
