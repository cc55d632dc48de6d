"""Leaving a state in the memory of nodes for the next fragment: only a shortcut. One that is not
committed is used only with the digest in the next order, from the executor's own channel.
"""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from parsl_freetrain.training.checkpoint.block_digests import digest_of_blocks
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.parts import contents_of, file_of
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory, image_of
from parsl_freetrain.training.checkpoint.transport_peers import PeerTransport
from parsl_freetrain.training.comm.inbox import GOES, Inbox
from parsl_freetrain.training.comm.peers import PeerLost, Peers
from parsl_freetrain.training.spec.messages import StateLeft

log = logging.getLogger(__name__)


class StateSender:
    """A rank's share in leaving a stopping fragment's state on nodes that stay."""

    def __init__(self, trainer: str, peers: Peers, inbox: Inbox, owners: Sequence[int]) -> None:
        self._trainer, self._peers, self.inbox = trainer, peers, inbox
        self._owners = owners
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self.left: StateLeft | None = None  # uncommitted

    def agree(self) -> None:
        """Begin to find out which nodes stay. All ranks call this; it does not wait."""
        standings = [-1] * self._peers.world_size
        standings[self._peers.rank] = self.inbox.standing()
        try:
            self._answer = self._peers.all_reduce_max(standings)
        except PeerLost:
            log.warning('The state is not left in memory: another rank is gone')

    def leave(self, state: State | None, samples: int, *, uncommitted: bool) -> None:
        """Leave this rank's part, and keep others'; None: it has none. All ranks call this."""
        try:
            self._leave(state, samples, uncommitted)
        except Exception:  # the checkpoint is there in any case
            log.warning(
                'The state could not be left in memory for the next fragment', exc_info=True
            )

    def keep(self, state: State | None) -> None:
        """Leave this rank's part of the last checkpoint on its node, unless that is taken away."""
        if state is not None and state.image is not None and self.inbox.standing() != GOES:
            NodeMemory(self._trainer).put(file_of(self._peers.rank), state.image)

    def _leave(self, state: State | None, samples: int, uncommitted: bool) -> None:
        heirs, rank = self._heirs(), self._peers.rank
        if rank not in (*heirs, *heirs.values()):
            return
        saving('leaving')
        image = state.image if state is not None else None
        ways = PeerTransport(self._peers, NodeMemory(self._trainer), heirs=heirs)
        kept = ways.put(file_of(rank), image)
        contents = None
        if uncommitted and kept and state is not None:
            with suppress(OSError):  # the heir waits for a word
                contents = image_of(state.part(rank).packed)
        kept = ways.put(contents_of(rank), contents)
        if contents is not None and contents.fd is not None:
            os.close(contents.fd)
            if kept:
                digest = digest_of_blocks(contents.blocks)
                self.left = StateLeft(digest, samples, here=heirs[rank] == rank)
        for owner in self._owners:
            if (digest := ways.taken.get(contents_of(owner), '')) != '':
                self.left = StateLeft(digest, samples, here=True)

    def _heirs(self) -> dict[int, int]:
        """By owner, the rank whose node keeps its part."""
        standings = self._answer() if self._answer is not None else ()
        best = max(standings, default=GOES)
        if best == GOES:
            return {}
        stay = [rank for rank, standing in enumerate(standings) if standing == best]
        return {
            owner: owner if owner in stay else stay[i % len(stay)]
            for i, owner in enumerate(self._owners)
        }
