"""Logs of blocks and their nodes. Those of the first go: projects have quotas of files."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

NODES, BLOCKS = 1000, 20
"""Number of nodes whose logs are kept, and of blocks that keep theirs in any case."""


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
