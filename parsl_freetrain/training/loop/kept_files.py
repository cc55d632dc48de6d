"""Files of a committed checkpoint that nodes have kept in memory, so that they need not be read.

What a node has not kept comes from another node, block by block; what none has is read from the
checkpoint. Each rank compares the digest of each block with what was committed, wherever it is
from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint.block_digests import digest_of_blocks
from parsl_freetrain.training.checkpoint.memory_image import bytes_in
from parsl_freetrain.training.checkpoint.part_reader import Block
from parsl_freetrain.training.checkpoint.parts import holds_tensors
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.handover_receive import fetch_fd
from parsl_freetrain.training.spec.fork_messages import FetchState


@dataclass(frozen=True)
class _Sending:
    block: Block
    sender: int
    receivers: tuple[int, ...]


class KeptFiles:
    """What the nodes of this fragment have kept of a checkpoint.

    All ranks make one together, and call :meth:`plan` and :meth:`finish` together.

    Parameters
    ----------
    files
        Of each file, its size in bytes and the digests of its blocks.

    Attributes
    ----------
    bytes_here, bytes_from_others
        What this rank has used, from its own node's memory and from another's.
    """

    def __init__(
        self, trainer: str, peers: Peers, files: Mapping[str, tuple[int, tuple[str, ...]]]
    ) -> None:
        self._trainer, self._peers = trainer, peers
        self._files = {name: files[name] for name in sorted(files) if holds_tensors(name)}
        self._here: dict[str, torch.Tensor] = {}
        self._sendings: list[_Sending] = []
        self.bytes_here = self.bytes_from_others = 0
        try:
            for name, (size, digests) in self._files.items():
                fd = self._fetch(name, digests, keep=True)
                if fd is not None:
                    with os.fdopen(fd):
                        self._here[name] = bytes_in(fd, size)
        except (OSError, EOFError, ValueError) as error:
            print(f'Nothing of the checkpoint could be had from memory: {error}')
        row = torch.tensor([name in self._here for name in self._files], dtype=torch.uint8)
        held = peers.all_gather(row).bool() if self._files else row[None]
        self._holders = {
            name: held[:, i].nonzero().flatten().tolist() for i, name in enumerate(self._files)
        }

    def plan(self, needed: Set[Block]) -> None:
        """Agree on who sends what to whom. ``needed``: the blocks that this rank will ask for, in
        order of file and number.
        """
        blocks = [
            (name, number)
            for name, (_, digests) in self._files.items()
            if self._holders[name]
            for number in range(len(digests))
        ]
        if not blocks:
            return
        mine = [block in needed and block[0] not in self._here for block in blocks]
        wanted = self._peers.all_gather(torch.tensor(mine, dtype=torch.uint8))
        for i, block in enumerate(blocks):
            holders = self._holders[block[0]]
            receivers = wanted[:, i].nonzero().flatten().tolist()
            if receivers:
                sender = holders[block[1] % len(holders)]
                self._sendings.append(_Sending(block, sender, tuple(receivers)))
        self._sendings.reverse()  # the next one is the last of the list

    def block(self, block: Block) -> memoryview | None:
        """The bytes of a block; None: no node has them. What precedes it is sent on the way, since
        all ranks go through the blocks in the same order.
        """
        received = None
        while self._sendings and self._sendings[-1].block <= block:
            received = self._next()
        if block[0] in self._here:
            found = self._part(block)
            self.bytes_here += found.nbytes
            return bytes_of(found)
        if received is None:
            return None
        self.bytes_from_others += received.nbytes
        return bytes_of(received)

    def finish(self) -> None:
        """Send what other ranks still need. What was kept is not needed any more."""
        while self._sendings:
            self._next()
        self._here.clear()

    def forget(self) -> None:
        """Let this node's memory go."""
        for name, (_, digests) in self._files.items():
            if self._peers.rank in self._holders[name]:
                fd = self._fetch(name, digests, keep=False)
                if fd is not None:
                    os.close(fd)

    def _next(self) -> torch.Tensor | None:
        """Do this rank's part in the next sending."""
        sending = self._sendings.pop()
        name, number = sending.block
        if self._peers.rank == sending.sender:
            part = self._part(sending.block)
            for receiver in sending.receivers:
                self._peers.send(part, receiver)
        elif self._peers.rank in sending.receivers:
            size = min(hashing.BLOCK, self._files[name][0] - number * hashing.BLOCK)
            return self._peers.recv(torch.empty(size, dtype=torch.uint8), sending.sender)
        return None

    def _part(self, block: Block) -> torch.Tensor:
        name, number = block
        return self._here[name][number * hashing.BLOCK : (number + 1) * hashing.BLOCK]

    def _fetch(self, name: str, digests: tuple[str, ...], *, keep: bool) -> int | None:
        return fetch_fd(FetchState(self._trainer, digest_of_blocks(digests), keep, name))
