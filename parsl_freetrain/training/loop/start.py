"""The state that a fragment continues from: left in memory, or read from the newest checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.manifest import Damaged, check_chosen, manifest_digest
from parsl_freetrain.training.checkpoint.state import Saved, State, assemble, read_split
from parsl_freetrain.training.checkpoint.store import CheckpointStore
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.comm.subgroup import ranks_of_node
from parsl_freetrain.training.loop.handover_receive import receive
from parsl_freetrain.training.loop.node_reading import read_once
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace


def start_of(
    order: FragmentOrder, place: RankPlace, store: CheckpointStore, peers: Peers
) -> tuple[Checkpoint | None, Saved | None]:
    """Fence earlier fragments, and give all ranks the state to continue from. All ranks call this
    together. On each node, one of them reads.

    Returns
    -------
    tuple
        The checkpoint, known to rank 0 only, and its content; None where training begins.
    """
    handed = order.handover
    saved = receive(handed, order.trainer, peers) if handed is not None else None
    in_memory = saved is not None
    latest: Checkpoint | None = None
    read: State | None = None

    def find() -> str:
        nonlocal latest, read
        digest = ''
        store.fence(order.fragment)
        if saved is not None and handed is not None:
            if handed.path:
                latest = Checkpoint(order.trainer, handed.path, handed.samples, handed.fragment)
            else:
                latest = store.newest()  # what to go back to
            latest = latest and replace(latest, metrics=dict(handed.metrics))
        else:
            while read is None and (latest := store.newest()) is not None:
                try:
                    digest = manifest_digest(Path(latest.path))
                    read = read_split(latest.path, verify=True)
                except Damaged as damage:
                    store.put_aside(Path(latest.path), str(damage))
        return json.dumps([latest.path if latest is not None else '', digest])

    # Rank 0 verifies what it reads, and chooses; the ranks might choose differently if each looked
    # for itself.
    path, digest = json.loads(peers.broadcast_object('checkpoint', find))
    if in_memory and handed is not None and not handed.path:
        print(f'Going on from the state in memory, with {handed.samples} samples')
    elif path and in_memory:
        print(f'Going on from checkpoint {path}, as it is in memory')

    def read_here() -> State:
        if read is not None:
            return read
        check_chosen(Path(path), Path(order.store), digest)
        return read_split(path)

    if saved is None and path:
        node = ranks_of_node(place)
        reader = f', which rank {place.rank - node.rank} reads for this node' if node.rank else ''
        print(f'Going on from checkpoint {path}{reader}')
        saved = assemble(path, read_once(node, read_here))
    return latest, saved
