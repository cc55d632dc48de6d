"""Which node a fragment that stops leaves its state on, in memory, and how the state gets there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from parsl_freetrain.training.handover import keep
from parsl_freetrain.training.inbox import GOES, STAYS, Inbox
from parsl_freetrain.training.packing import bytes_in, digest_of, pack
from parsl_freetrain.training.peers import PeerLost, Peers
from parsl_freetrain.training.state import State

log = logging.getLogger(__name__)


class Leaving:
    """One rank's part in leaving the state on a node that stays: by rank 0 on its own node, or else from there over the network.

    A node stays if it was told so; where only some nodes have been told that they go, the others are taken to stay. The lowest rank
    on such a node is the heir; without one nothing is left. Only rank 0 has all of a state: its own part of what the ranks share, and
    from the stages of a pipeline theirs. So the heir's copy is of the same bytes as the checkpoint.

    Attributes
    ----------
    left
        The digest of the state, its samples, and whether it is ``here``, with this node's warm parent; None: this rank has left nothing.
        Rank 0 says what it has sent, which the heir's must be the same as.
    """

    def __init__(self, trainer: str, peers: Peers, inbox: Inbox) -> None:
        self._trainer = trainer
        self._peers = peers
        self._inbox = inbox
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self.left: dict[str, Any] | None = None

    def agree(self) -> None:
        """Begin to find the heir: all ranks, once it is decided that the fragment stops. Does not wait for the others."""
        standing, ranks = self._inbox.standing(), self._peers.world_size
        try:
            # Who stays goes before who may stay, and the lower rank before the higher.
            self._answer = self._peers.largest((standing * ranks + ranks - 1 - self._peers.rank, standing == GOES))
        except PeerLost:
            log.warning('The state is not left in memory: another rank is gone')

    def leave(self, state: State, samples: int) -> None:
        """At rank 0: leave the state in memory for the next fragment, if there is an heir; where that fails it reads the checkpoint."""
        try:
            if (heir := self._heir()) is not None:
                self._leave(state, samples, heir)
        except Exception:  # torch tells of too little memory by RuntimeErrors; whatever it is, the checkpoint is there
            log.warning('The state could not be left in memory for the next fragment', exc_info=True)

    def take(self, samples: int) -> None:
        """At the other ranks: keep what rank 0 sends, if this is the heir.

        Raises
        ------
        PeerLost
            If rank 0 is gone.
        """
        if self._peers.rank == 0 or self._heir() != self._peers.rank:
            return
        size = int(self._peers.receive(torch.zeros(1, dtype=torch.int64), 0))
        if not size:
            return
        fd = os.memfd_create('freetrain-state', os.MFD_CLOEXEC)
        try:
            data = _room(fd, size)
            self._peers.send(torch.tensor([int(data is not None)]), 0)
            if data is not None:
                digest = digest_of(self._peers.receive(data, 0))
                if keep(self._trainer, fd, digest):
                    self.left = {'digest': digest, 'samples': samples, 'here': True}
        except (OSError, EOFError):
            log.warning('The state could not be kept in memory for the next fragment', exc_info=True)
        finally:
            os.close(fd)

    def _heir(self) -> int | None:
        if self._answer is None:
            return None
        best, some_go = self._answer()
        standing, above = divmod(best, self._peers.world_size)
        return self._peers.world_size - 1 - above if standing == STAYS or (standing > GOES and some_go) else None

    def _leave(self, state: State, samples: int, heir: int) -> None:
        try:
            fd, data = pack(state)
        except Exception:
            if heir:
                self._announce(0, heir)
            raise
        try:
            digest = digest_of(data)
            here = heir == 0 and keep(self._trainer, fd, digest)
            if here or (heir and self._send(data, heir)):
                self.left = {'digest': digest, 'samples': samples, 'here': here}
        finally:
            os.close(fd)

    def _announce(self, size: int, heir: int) -> None:
        self._peers.send(torch.tensor([size]), heir)

    def _send(self, data: torch.Tensor, heir: int) -> bool:
        self._announce(data.numel(), heir)
        if not int(self._peers.receive(torch.zeros(1, dtype=torch.int64), heir)):
            return False
        self._peers.send(data, heir)
        return True


def _room(fd: int, size: int) -> torch.Tensor | None:
    """A file in memory, made so large, as a tensor; None if there is too little memory."""
    try:
        os.posix_fallocate(fd, 0, size)
        return bytes_in(fd)
    except OSError:
        log.warning('There is no memory for a state of %d bytes', size, exc_info=True)
        return None
