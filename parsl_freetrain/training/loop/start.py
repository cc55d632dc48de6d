"""The beginning of a fragment: its state, left in memory or read from the newest checkpoint."""

import io
import json
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
import torch

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import manifest as manifests
from parsl_freetrain.training.checkpoint.block_digests import blocks_of, digest, digest_of_blocks
from parsl_freetrain.training.checkpoint.fault_hooks import saving
from parsl_freetrain.training.checkpoint.frozen import write_anew
from parsl_freetrain.training.checkpoint.part_writers import PartWriters
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.source import Opened
from parsl_freetrain.training.checkpoint.state import Saved, Source
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.checkpoint.transport import Disk
from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory
from parsl_freetrain.training.checkpoint.transport_peers import PeerTransport
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Peers, gather, gather_bytes
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.handover import StateSender
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, Handover, RankPlace
from parsl_freetrain.training.spec.messages import ToRank


def begin(
    order: FragmentOrder,
    place: RankPlace,
    peers: Peers,
    channel: Channel[ToRank],
    inbox: Inbox,
    device: torch.device,
) -> RankParts:
    """Fence earlier fragments, and find what the rank trains with. All ranks call this together."""
    store = PosixCheckpointStore(Path(order.store), order.trainer, hook=saving)
    if place.rank == 0:
        if order.samples and not store.last_fragment():
            raise BadInput(
                f'Folder {store.folder}, with a checkpoint at {order.samples} samples, was deleted '
                'or moved while its trainer was running: put it back, or call the trainer in a new '
                'run to start anew.'
            )
        store.fence(order.fragment)
    latest, saved = find_start(order, place, store, peers)
    sharded, world_size = order.spec.sharded, place.world_size
    sender = StateSender(order.trainer, peers, inbox, range(world_size if sharded else 1))
    checkpointer: Checkpointer
    writers = PartWriters(
        peers.store() if sharded else None,
        place.rank,
        world_size if sharded else 1,
        store.folder,
        lambda: checkpointer.patience_s(),
    )
    checkpointer = Checkpointer(store, order, channel, latest, sender, writers)
    if saved is not None and saved.position.samples > (latest.samples if latest else 0):
        checkpointer.save_soon()
    return RankParts(order, place, peers, channel, inbox, checkpointer, device, saved)


def find_start(
    order: FragmentOrder, place: RankPlace, store: PosixCheckpointStore, peers: Peers
) -> tuple[Checkpoint | None, Source | None]:
    """The newest checkpoint (rank 0), and the state to go on from, or None. All ranks."""
    per_node = place.world_size // place.nodes
    handed = order.handover
    contents = left_in_memory(handed, order.trainer, peers) if handed is not None else None
    if contents is not None and handed is not None:
        found = SharedState('in memory', contents, order.trainer, store, peers, per_node)
        if found.complete:
            print(f'Going on from the state in memory, with {handed.samples} samples')
            # Rank 0 alone knows what to go back to.
            latest = store.newest() if place.rank == 0 else None
            with_metrics = latest and replace(latest, metrics=dict(handed.metrics))
            try:
                return with_metrics, found if order.spec.sharded else found.load()
            except manifests.Damaged as damage:
                print(f'{damage} The checkpoint is used.')
    for attempt in count():
        latest, contents, path = newest(store, peers, attempt)
        if contents is None:
            return latest, None
        found = SharedState(path, contents, order.trainer, store, peers, per_node)
        print(f'Going on from checkpoint {path}')
        if order.spec.sharded:
            return latest, found
        try:
            return latest, found.load()
        except manifests.SharedDamaged as damage:
            print(damage)
            return latest, found  # what ctx.prepare gets may have what is in the file
        except manifests.Damaged as damage:
            print(damage)
    raise AssertionError('unreachable')


class SharedState:
    """A state that all ranks read together, each what it needs from the nearest place."""

    def __init__(
        self,
        path: str,
        contents: Contents,
        trainer: str,
        store: PosixCheckpointStore,
        peers: Peers,
        per_node: int,
    ) -> None:
        self._store, self._peers = store, peers
        self._committed = Path(path).is_absolute()
        self.disk = Disk(Path(path) if self._committed else store.folder / path, contents.files)
        self._memory = NodeMemory(trainer, contents.files)
        self._ways = PeerTransport(peers, self._memory, self.disk, contents.files, per_node)
        self._opened, self._mended = Opened(path, contents, self._ways), False
        self.path, self.position = path, self._opened.position
        self.complete = all(
            n.startswith(manifests.SHARED) or self._ways.has(n) for n in contents.files
        )

    def load(self, prepared: Prepared | None = None) -> Saved:
        """Its content, divided as the prepared models are; all ranks. BadInput for other models;
        Damaged on all ranks if one has found damage (the checkpoint is set aside, and files of
        several checkpoints are written anew if what is prepared has the same values).
        """
        damage, saved = '', None
        try:
            saved = self._opened.load(prepared)
        except manifests.Damaged as error:
            damage = str(error)
            if self._committed and not isinstance(error, manifests.SharedDamaged):
                self._store.put_aside(Path(self.path), damage)
        print(
            f'Of the state, {self._ways.bytes_here} bytes were in memory here, '
            f'{self._ways.bytes_from_others} came from other ranks, and {self.disk.bytes_read} '
            'were read'
        )
        said = [text.decode() for text in gather_bytes(self._peers, damage.encode())]
        if self._committed or any(said):  # else it may be needed once more
            self._memory.forget()
        if own := [one for one in said if one and not one.startswith(manifests.SHARED_FOLDER)]:
            raise manifests.Damaged(f'The state {self.path} is damaged ({max(own)}).')
        if saved is None or any(said):
            if prepared is None or self._mended:
                raise manifests.SharedDamaged(max(said))
            write = partial(write_anew, self._store.folder, self._opened, prepared)
            if not self._peers.broadcast_object('frozen', lambda: 'written' if write() else ''):
                raise BadInput(f'{max(said)} What ctx.prepare was given has other values.')
            self._mended = True
            print(f'{max(said)} It was written anew.')
            return self.load(prepared)
        return saved


def newest(
    store: PosixCheckpointStore, peers: Peers, attempt: int
) -> tuple[Checkpoint | None, Contents | None, str]:
    """The newest checkpoint (on rank 0), its content and path. Rank 0 chooses for all."""
    latest: Checkpoint | None = None
    packed = b''

    def find() -> str:
        nonlocal latest, packed
        while (latest := store.newest()) is not None:
            try:
                packed = Contents.read(Path(latest.path)).packed
            except manifests.Damaged as damage:
                store.put_aside(Path(latest.path), str(damage))
                continue
            return json.dumps([latest.path, digest(packed), len(packed)])
        return ''

    told = peers.broadcast_object(f'checkpoint-{attempt}', find)
    if not told:
        return latest, None, ''
    path, expected, size = json.loads(told)
    data = torch.frombuffer(bytearray(packed or bytes(size)), dtype=torch.uint8)
    peers.broadcast([data])
    if digest(bytes_of(data)) != expected:
        raise FreeTrainError(f'What rank 0 sent of checkpoint {path} is not what has arrived.')
    return latest, Contents.unpacked(bytes_of(data)), path


def left_in_memory(handover: Handover, trainer: str, peers: Peers) -> Contents | None:
    """What consists the state of that ranks have left; None on all ranks if a part is missing."""
    memory, digests = NodeMemory(trainer), [one for part in handover.parts for one in part]
    here = {one: memory.map(one) for one in digests}
    row = torch.tensor([here[one] is not None for one in digests], dtype=torch.uint8)
    held = peers.all_gather(row)
    first = {one: held[:, i].nonzero().flatten().tolist()[:1] for i, one in enumerate(digests)}
    chosen = [next((one for one in part if first[one]), '') for part in handover.parts]
    if not all(chosen):
        return None
    mine = [bytes(here[one] or b'') for one in chosen if first[one] == [peers.rank]]
    packed = [one for of_rank in gather(peers, mine) for one in of_rank]
    contents = None
    try:
        by_digest = {digest_of_blocks(blocks_of(io.BytesIO(one))): one for one in packed}
        contents = Contents.united([Contents.unpacked(by_digest[one]) for one in chosen])
    except (KeyError, FreeTrainError, msgspec.DecodeError) as error:
        print(f'The state in memory is not complete: {error}')
    (missing,) = peers.all_reduce_max((contents is None,))()
    return None if missing else contents
