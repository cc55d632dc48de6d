"""What the ranks of a fragment are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import Shape
from parsl_freetrain.training.policies import STOP
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled

REPRODUCIBLE = 'reproducible'
THROUGHPUT = 'throughput'
SCALED = 'scaled'
MODES = (REPRODUCIBLE, THROUGHPUT, SCALED)


@dataclass(frozen=True)
class Handover:
    """A state that the fragment before has left in memory, on the node that has rank 0 now.

    Attributes
    ----------
    digest
        Of its bytes; see :mod:`parsl_freetrain.training.handover`.
    path, samples, fragment, metrics
        The checkpoint that is the same state, as :class:`~parsl_freetrain.core.words.Checkpoint` has them.
    """

    digest: str
    path: str
    samples: int
    fragment: int
    metrics: Mapping[str, float] = field(default_factory=dict)


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
        One of :data:`MODES`.
    shards
        Virtual shards of the global batch in reproducible mode; more ranks than that are of no use.
    seed
        Of the data order and of every random number that the user's function draws.
    deadline
        ``time.time()`` at which the nodes go; None where unknown.
    checkpoint_every_s
        Seconds between periodic checkpoints.
    keep
        Which checkpoints stay when a new one has been committed.
    scaled
        How training changes with the ranks in mode 'scaled'.
    on_nan
        What is done about gradients that are not finite: one of :data:`parsl_freetrain.training.nonfinite.POLICIES`.
    shape
        How the ranks share the work, where the trainer states it; None: every rank trains samples of its own.
    ranks_per_node
        How many ranks each node has; they share its GPUs.
    interface
        Network interface of the exchange between ranks, for instance 'hsn0'; None: 'lo' on one node, the host's own address otherwise.
    threads
        torch threads per rank; part of what makes results reproducible.
    hang_s
        Seconds within which a rank that is stopped, or a peer that cannot be reached, ends the fragment.
    handover
        Where the state to begin with is in memory; None: it is read from the newest checkpoint.
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
    keep: Retention = field(default_factory=Retention)
    scaled: Scaled = field(default_factory=Scaled)
    on_nan: str = 'stop'
    shape: Shape | None = None
    ranks_per_node: int = 1
    interface: str | None = None
    threads: int = 1
    hang_s: float = 15.0
    handover: Handover | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FragmentOrder:
        """The order of which ``document`` is what :func:`dataclasses.asdict` gave."""
        shape, handed = document['shape'], document['handover']
        return cls(**{**document, 'keep': Retention(**document['keep']), 'scaled': Scaled(**document['scaled']),
                      'shape': Shape(**shape) if shape else None, 'handover': Handover(**handed) if handed else None})


@dataclass(frozen=True)
class RankPlace:
    """Which rank a process is.

    Attributes
    ----------
    rank, world_size
        This rank, from 0, and how many ranks the fragment has.
    local_rank
        This rank among those of its node, from 0; picks its GPUs.
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


def check_shape(shape: Shape, mode: str, on_nan: str, where: str) -> None:
    """Refuse what a shape cannot do.

    Raises
    ------
    BadInput
        With ``where`` before it.
    """
    if prod(shape.sizes[1:]) == 1:
        return
    if mode != THROUGHPUT:
        raise BadInput(f"{where}: mode is {mode!r}, and the shape {shape} divides more than the data; say mode='throughput'.")
    if shape.pipeline > 1 and on_nan != STOP:
        raise BadInput(f"{where}: on_nan is {on_nan!r}, but the stages of a pipeline cannot leave out a step each for itself; "
                       f"say on_nan='stop', or give shapes without a pipeline.")
