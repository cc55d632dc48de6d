"""The beginning of a fragment whose ranks divide the parameters: every rank opens the checkpoint,
and reads its own parts when it has the models.
"""

from __future__ import annotations

from pathlib import Path

import torch

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.sharded_state import Opened
from parsl_freetrain.training.checkpoint.state import Saved
from parsl_freetrain.training.checkpoint.store import CheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.part_writers import PartWriters
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.handover_send import LeavingPart
from parsl_freetrain.training.loop.kept_files import KeptFiles
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import ToRank

_FEWEST_S = 1.0
_TIMES = 10  # a part that takes this many times as long as any before is not waited for


class SharedCheckpoint:
    """A checkpoint that all ranks read together, each its own parts.

    Attributes
    ----------
    path, position
        As in :class:`~parsl_freetrain.training.checkpoint.state.Saved`.
    """

    def __init__(
        self, opened: Opened, store: CheckpointStore, peers: Peers, kept: KeptFiles
    ) -> None:
        self._opened, self._store, self._peers, self._kept = opened, store, peers, kept
        self.path, self.position = opened.path, opened.position

    def load(self, prepared: Prepared) -> Saved:
        """This rank's parts. All ranks call this together.

        Raises
        ------
        BadInput
            If the models are others.
        Damaged
            On all ranks, if one of them has found damage. The checkpoint is set aside then.
        """
        damage, saved, kept = '', None, self._kept
        try:
            saved = self._opened.load(prepared, kept)
        except Damaged as error:
            damage = str(error)
            self._store.put_aside(Path(self.path), damage)
        kept.finish()
        print(
            f'Of the state, {kept.bytes_here} bytes were in memory here, {kept.bytes_from_others} '
            f'came from other ranks, and {self._opened.bytes_read} were read'
        )
        if not self._peers.all_reduce_max((saved is None,))()[0] and saved is not None:
            kept.forget()
            return saved
        raise Damaged(
            f'Checkpoint {self.path} is damaged ({damage or "another rank says where"}); the next '
            'fragment uses the one before.'
        )


def begin_sharded(
    order: FragmentOrder,
    place: RankPlace,
    peers: Peers,
    channel: Channel[ToRank],
    inbox: Inbox,
    device: torch.device,
    store: CheckpointStore,
) -> RankParts:
    """Fence earlier fragments, and open the newest checkpoint that no rank finds damaged."""
    latest: Checkpoint | None = None

    def find() -> str:
        nonlocal latest
        store.fence(order.fragment)
        latest = store.newest()
        return latest.path if latest is not None else ''

    attempt, opened = 0, None
    while path := peers.broadcast_object(f'checkpoint-{attempt}', find):
        try:
            opened = Opened(path)
        except Damaged as error:
            store.put_aside(Path(path), str(error))
        if not peers.all_reduce_max((opened is None,))()[0]:
            print(f'Going on from checkpoint {path}')
            break
        attempt, opened = attempt + 1, None
    checkpointer: Checkpointer
    writers = PartWriters(
        peers.store(),
        place.rank,
        place.world_size,
        Path(order.store),
        lambda: _TIMES * max(checkpointer.longest_s, _FEWEST_S),
    )
    part = LeavingPart(order.trainer, inbox, writers)
    checkpointer = Checkpointer(store, order, channel, latest, writers=writers, leaving_part=part)
    saved = None
    if opened is not None:
        kept = KeptFiles(order.trainer, peers, opened.files)
        saved = SharedCheckpoint(opened, store, peers, kept)
    return RankParts(order, place, peers, channel, inbox, checkpointer, device, saved)
