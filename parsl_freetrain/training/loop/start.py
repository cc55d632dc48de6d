"""The state that a fragment continues from: left in memory, or read from the newest checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.manifest import Damaged, check_chosen, manifest_digest
from parsl_freetrain.training.checkpoint.state import Saved, read_state
from parsl_freetrain.training.checkpoint.store import CheckpointStore
from parsl_freetrain.training.comm.collectives import Peers
from parsl_freetrain.training.loop.handover_receive import receive
from parsl_freetrain.training.spec.order import FragmentOrder


def start_of(
    order: FragmentOrder, store: CheckpointStore, peers: Peers
) -> tuple[Checkpoint | None, Saved | None]:
    """Fence earlier fragments, and give all ranks the state to continue from. All ranks call this
    together.

    Returns
    -------
    tuple
        The checkpoint, known to rank 0 only, and its content; None where training begins.
    """
    handed = order.handover
    saved = receive(handed, order.trainer, peers) if handed is not None else None
    in_memory = saved is not None
    latest: Checkpoint | None = None

    def find() -> str:
        nonlocal latest, saved
        digest = ''
        store.fence(order.fragment)
        if saved is not None and handed is not None:
            latest = Checkpoint(
                order.trainer, handed.path, handed.samples, handed.fragment, dict(handed.metrics)
            )
        else:
            while saved is None and (latest := store.newest()) is not None:
                try:
                    digest = manifest_digest(Path(latest.path))
                    saved = read_state(latest.path, verify=True)
                except Damaged as damage:
                    store.put_aside(Path(latest.path), str(damage))
        return json.dumps([latest.path if latest is not None else '', digest])

    # Rank 0 verifies what it reads, and chooses; the ranks might choose differently if each looked
    # for itself.
    path, digest = json.loads(peers.tell('checkpoint', find))
    if path:
        print(f'Going on from checkpoint {path}{", as it is in memory" if in_memory else ""}')
    if saved is None and path:
        check_chosen(Path(path), Path(order.store), digest)
        saved = read_state(path)
    return latest, saved
