"""The runtime of a live run: blocks of a site, and fragments that are tasks of Parsl."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block.blocks import BlockManager
from parsl_freetrain.executor.fragment.runner import FragmentRunner

logger = logging.getLogger(__name__)


class LiveRuntime:
    """Implements :class:`~parsl_freetrain.core.controller.runtime.Runtime`."""

    def __init__(self, blocks: BlockManager, fragments: FragmentRunner) -> None:
        self._blocks, self._fragments = blocks, fragments

    def open(self, request: BlockRequest, at: float) -> None:
        """As in the protocol, as everything here."""
        self._blocks.open(request, at)

    def close(self, blocks: Sequence[ev.CloseBlock], at: float) -> None:
        for one in blocks:
            logger.info('Giving block %s back: %s', one.block, one.why)
        self._blocks.close([one.block for one in blocks], at)

    def release(self, nodes: ev.ReleaseNodes, at: float) -> None:
        count = len(nodes.nodes)
        logger.info('Giving %d nodes of block %s back: %s', count, nodes.block, nodes.why)
        self._blocks.release(nodes.block, nodes.nodes, at)

    def launch(self, fragment: ev.StartFragment, at: float) -> None:
        self._fragments.start(fragment, at)

    def send(self, stop: ev.StopFragment, at: float) -> None:
        self._fragments.stop(stop, at)

    def kill(self, fragment: ev.AbandonFragment, at: float) -> None:
        self._fragments.abandon(fragment)
