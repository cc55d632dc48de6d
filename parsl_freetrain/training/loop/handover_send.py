"""Leaving the state of a stopping fragment in the memory of a node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from parsl_freetrain.training.checkpoint.memory_image import bytes_in, digest_of, pack
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.comm.inbox import GOES, STAYS, Inbox
from parsl_freetrain.training.comm.part_writers import PartWriters
from parsl_freetrain.training.comm.peers import PeerLost, Peers
from parsl_freetrain.training.loop.handover_receive import is_wanted, keep
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fork_messages import OfferState
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import LeavingState, StateLeft, ToRank

log = logging.getLogger(__name__)


class Leaving:
    """One rank's part in leaving the state on a node that stays. Rank 0 leaves it on its own node
    or sends it to another one.

    A node stays if it was told so. If only some nodes were told that they are taken away, the
    others count as staying. The lowest rank on such a node is the receiver; without a receiver
    nothing is left. Only rank 0 has the complete state, including its own part of what all ranks
    share and the parts of the other stages of a pipeline. So the receiver's copy has the same bytes
    as the checkpoint.

    Attributes
    ----------
    left
        The digest of the state, its number of samples, and whether it is ``here``, with this node's
        fork server; None: this rank has left nothing. Rank 0 states what it has sent, which must be
        equal to what the receiver has.
    """

    def __init__(self, trainer: str, peers: Peers, inbox: Inbox) -> None:
        self._trainer = trainer
        self._peers = peers
        self._inbox = inbox
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self.left: StateLeft | None = None

    def agree(self) -> None:
        """Begin to determine the receiver, once the fragment is to stop. All ranks call this; it
        does not wait.
        """
        standing, ranks = self._inbox.standing(), self._peers.world_size
        try:
            # Prefer a node known to stay to one that may stay, and then the lowest rank.
            self._answer = self._peers.all_reduce_max(
                (standing * ranks + ranks - 1 - self._peers.rank, standing == GOES)
            )
        except PeerLost:
            log.warning('The state is not left in memory: another rank is gone')

    def leave(self, state: State, samples: int) -> None:
        """On rank 0: leave the state in memory for the next fragment, if there is a receiver. If
        that fails, the next fragment reads the checkpoint.
        """
        try:
            if (receiver := self._receiver()) is not None:
                self._leave(state, samples, receiver)
        except Exception:  # the checkpoint is there in any case
            log.warning(
                'The state could not be left in memory for the next fragment', exc_info=True
            )

    def take(self, samples: int) -> None:
        """On the other ranks: keep what rank 0 sends, if this rank is the receiver. Raises PeerLost
        if rank 0 is gone.
        """
        if self._peers.rank == 0 or self._receiver() != self._peers.rank:
            return
        size = int(self._peers.recv(torch.zeros(1, dtype=torch.int64), 0))
        if not size:
            return
        fd = os.memfd_create('freetrain-state', os.MFD_CLOEXEC)
        try:
            data = _room(fd, size)
            self._peers.send(torch.tensor([int(data is not None)]), 0)
            if data is not None:
                digest = digest_of(self._peers.recv(data, 0))
                if self._kept(fd, digest):
                    self.left = StateLeft(digest, samples, here=True)
                self._peers.send(torch.tensor([int(self.left is not None)]), 0)
        finally:
            os.close(fd)

    def followed(self) -> bool:
        """On rank 0: whether the next fragment is ready to go on from a state in memory."""
        return self._inbox.followed()

    def _kept(self, fd: int, digest: str) -> bool:
        try:
            return keep(self._trainer, fd, digest)
        except (OSError, EOFError):
            log.warning(
                'The state could not be kept in memory for the next fragment', exc_info=True
            )
            return False

    def _receiver(self) -> int | None:
        if self._answer is None:
            return None
        best, some_go = self._answer()
        standing, above = divmod(best, self._peers.world_size)
        return (
            self._peers.world_size - 1 - above
            if standing == STAYS or (standing > GOES and some_go)
            else None
        )

    def _leave(self, state: State, samples: int, receiver: int) -> None:
        try:
            fd, data = pack(state)
        except Exception:
            if receiver:
                self._announce(0, receiver)
            raise
        try:
            digest = digest_of(data)
            here = receiver == 0 and keep(self._trainer, fd, digest)
            if here or (receiver and self._send(data, receiver)):
                self.left = StateLeft(digest, samples, here=here)
        finally:
            os.close(fd)

    def _announce(self, size: int, receiver: int) -> None:
        self._peers.send(torch.tensor([size]), receiver)

    def _send(self, data: torch.Tensor, receiver: int) -> bool:
        self._announce(data.numel(), receiver)
        if not int(self._peers.recv(torch.zeros(1, dtype=torch.int64), receiver)):
            return False
        self._peers.send(data, receiver)
        return bool(self._peers.recv(torch.zeros(1, dtype=torch.int64), receiver))


class LeavingPart:
    """One rank's part in leaving a sharded state: each node keeps the files of a checkpoint that
    its ranks have written, for as long as they are of use.
    """

    def __init__(self, trainer: str, inbox: Inbox, writers: PartWriters) -> None:
        self._trainer, self._inbox, self._writers = trainer, inbox, writers

    def possible(self) -> bool:
        """Whether this node is not known to be taken away."""
        return self._inbox.standing() != GOES

    def leave(self) -> None:
        """Leave the part of the last checkpoint. The next fragment uses it if that checkpoint has
        been committed.
        """
        part = self._writers.written
        if part is None or not self.possible():
            return
        try:
            keep(self._trainer, part.fd, part.digest, file=part.file)
        except (OSError, EOFError):  # the next fragment reads the checkpoint
            log.warning('A part of the state could not be left in memory', exc_info=True)


def leave_behind(
    order: FragmentOrder,
    channel: Channel[ToRank],
    samples: int,
    needs: int,
    state: Callable[[], State],
) -> StateLeft | None:
    """After the loss of another rank: leave this rank's state in the memory of its node. None if
    there is a checkpoint as new, or another rank of the node leaves it.
    """
    offer = OfferState(order.trainer, order.fragment, samples)
    if samples <= order.samples or not is_wanted(offer):
        return None
    channel.send(LeavingState())
    fd, data = pack(state())
    try:
        digest = digest_of(data)
        if not keep(order.trainer, fd, digest, offer):
            return None
        return StateLeft(digest, samples, here=True, needs=needs)
    finally:
        os.close(fd)


def _room(fd: int, size: int) -> torch.Tensor | None:
    """A file of ``size`` bytes in memory, as a tensor; None if there is too little memory."""
    try:
        os.posix_fallocate(fd, 0, size)
        return bytes_in(fd)
    except OSError:
        log.warning('There is no memory for a state of %d bytes', size, exc_info=True)
        return None
