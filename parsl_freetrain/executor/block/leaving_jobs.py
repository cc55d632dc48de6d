"""A node's first and last task, and jobs that their nodes end, sooner than a cancel would."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.executor.block.block_record import BlockRecord
from parsl_freetrain.executor.interchange import PIN
from parsl_freetrain.executor.parsl_side import ParslSide
from parsl_freetrain.host.backoff import Backoff
from parsl_freetrain.sites.protocols import Yielding
from parsl_freetrain.sites.provider import BackfillProvider

LEAVE_S = 1.0
"""Time for the nodes of a block to end its job, in seconds; after that it is cancelled."""

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
