"""Jobs whose nodes end them: a scheduler that is told to end a job looks for its processes with
pauses, soon of a second, and has the nodes free that much later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.executor.block.node_tasks import leaving
from parsl_freetrain.executor.block.record import BlockRecord
from parsl_freetrain.sites.protocols import Yielding
from parsl_freetrain.sites.provider import BackfillProvider

LEAVE_S = 1.0
"""Time for the nodes of a block to end its job, in seconds; after that it is cancelled."""


class LeavingJobs:
    """Ends the jobs of blocks that are given back. ``submit``: sends one payload to the
    interchange.
    """

    def __init__(
        self, provider: BackfillProvider, submit: Callable[[dict[str, Any], bytes], Future[Any]]
    ) -> None:
        self._provider = provider
        self._submit = submit
        self._until: dict[str, float] = {}  # by job id: then it is cancelled

    def tell(self, *managers: str) -> None:
        """Tell these nodes to end, where jobs of others may wait for them."""
        if isinstance(self._provider.site, Yielding):
            with suppress(TrainerFailed):  # the scheduler ends them
                for manager in managers:
                    self._submit(leaving(manager), b'')

    def end(self, blocks: Sequence[BlockRecord], at: float) -> None:
        """End the jobs of these blocks. One whose nodes have not all joined is cancelled at
        once.
        """
        for block in blocks:
            self.tell(*block.greeted)
        site = self._provider.site
        told = [
            block.job_id
            for block in blocks
            if isinstance(site, Yielding) and len(block.nodes) >= block.request.nodes
        ]
        if isinstance(site, Yielding) and told:
            site.leaving(told)
        self._until |= dict.fromkeys(told, at + LEAVE_S)
        self._provider.cancel([block.job_id for block in blocks if block.job_id not in told])

    def cancel(self, at: float) -> None:
        """Cancel those that have had time to end; all of them if ``at`` is infinite."""
        if late := [job_id for job_id, until in self._until.items() if until <= at]:
            self._provider.cancel(late)
            for job_id in late:
                del self._until[job_id]
