"""What the ranks of a fragment are told."""

from __future__ import annotations

from dataclasses import dataclass

REPRODUCIBLE = 'reproducible'
THROUGHPUT = 'throughput'


@dataclass(frozen=True)
class FragmentOrder:
    """What all ranks of a fragment are told; goes through JSON by :func:`dataclasses.asdict`.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment, from 1.
    store
        The trainer's checkpoint folder.
    total_samples, total_epochs
        What is trained in total, over all fragments; one of both is None.
    mode
        'reproducible' or 'throughput'.
    shards
        Virtual shards of the global batch in reproducible mode; more ranks than that are of no use.
    seed
        Of the data order and of every random number that the user's function draws.
    deadline
        ``time.time()`` at which the nodes go; None where unknown.
    checkpoint_every_s
        Seconds between periodic checkpoints.
    keep_checkpoints
        How many checkpoints stay when a new one has been committed.
    backend
        Of torch.distributed: 'gloo' or 'nccl'.
    interface
        Network interface of the exchange between ranks, for instance 'hsn0'; None: 'lo' on one node, the host's own address otherwise.
    threads
        torch threads per rank; part of what makes results reproducible.
    """

    trainer: str
    fragment: int
    store: str
    total_samples: int | None
    total_epochs: float | None
    mode: str
    shards: int
    seed: int
    deadline: float | None
    checkpoint_every_s: float
    keep_checkpoints: int = 3
    backend: str = 'gloo'
    interface: str | None = None
    threads: int = 1


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is.

    Attributes
    ----------
    rank, world_size
        This rank, from 0, and how many ranks the fragment has.
    local_rank
        This rank among those of its node, from 0; picks the GPU.
    nodes
        How many nodes the fragment has.
    log
        File that gets the rank's standard output and error; its directory exists.
    """

    rank: int
    world_size: int
    local_rank: int
    nodes: int
    log: str
