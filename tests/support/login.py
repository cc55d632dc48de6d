"""A training that is submitted on one computer and runs on others: ``python -m tests.support.login
FOLDER EPOCHS PAUSE_S NODE ...``, with nodes of :mod:`tests.support.computers`.
"""

import sys
from pathlib import Path
from typing import Any

from parsl_freetrain import Checkpoints, LocalSite, Reproducible, Scaling, freetrain_app
from parsl_freetrain.core.model.types import BlockRequest
from tests.support.computers import INTERFACE, on_computer
from tests.support.training import fit, freetrain

SHARDS, SEED, HANG_S = 2, 7, 4.0


class Computers(LocalSite):
    """A site whose nodes are computers of their own; they share files only."""

    is_local = False
    interface: str | None = INTERFACE

    def open_block(
        self, request: BlockRequest, command: str, name: str, worker_init: str = ''
    ) -> str:
        """Start the command on the computers of the block."""
        there = on_computer('"$FREETRAIN_NODE"', ['/bin/bash', '-c', command])
        return super().open_block(request, there, name, worker_init)


def main(folder: str, epochs: str, pause_s: str, *nodes: str) -> None:
    trainer: Any = freetrain_app(
        min_nodes=len(nodes),
        max_nodes=len(nodes),
        total_epochs=int(epochs),
        mode=Reproducible(shards=SHARDS, seed=SEED),
        checkpoints=Checkpoints(every_s=1.0),
        scaling=Scaling(rate={1: 1.0, 2: 1.9}, rescale_up_s=0.1, rescale_down_s=0.1),
    )(fit)
    with freetrain(
        Path(folder),
        Computers(nodes, poll_s=0.2),
        hang_s=HANG_S,
        heartbeat_period=1,
        heartbeat_threshold=4,
        retries=100,
    ):
        print(trainer(pause_s=float(pause_s), trainer_name='fit').result().path)


if __name__ == '__main__':
    main(*sys.argv[1:])
