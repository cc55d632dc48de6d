"""The instructions for the ranks of a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.spec.training import TrainingSpec


@dataclass(frozen=True)
class Handover:
    """A state that an earlier fragment left in the memory of nodes and has not committed.

    Attributes
    ----------
    parts
        Of each of its parts, the digests of what ranks have left of it, each of which will do; see
        :mod:`parsl_freetrain.training.loop.handover`.
    samples, metrics
        As in :class:`~parsl_freetrain.core.model.types.Checkpoint`.
    """

    parts: tuple[tuple[str, ...], ...]
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FragmentOrder:
    """Instructions for all ranks of a fragment.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment, from 1.
    store
        The trainer's checkpoint folder.
    samples
        Samples of the newest checkpoint that the executor knows; 0: none.
    spec
        What to train, and how.
    deadline
        ``time.time()`` at which the nodes are taken away; None if unknown.
    exempt_until
        ``time.time()`` before which nothing preempts the fragment; None: something may.
    speeds
        How fast each node is, relative to the others: virtual shards are divided by it. Empty: the
        nodes are alike.
    interruptions_per_s
        How often to expect that its nodes are taken without notice; None: not known.
    shape
        How the ranks share the work; None: every rank trains its own samples.
    interface
        Network interface of the communication between ranks, for instance 'hsn0'; None: 'lo' on one
        node, otherwise the host's own address.
    hang_s
        Maximum seconds until a stopped rank or an unreachable peer ends the fragment.
    handover
        The initial state in memory; None: it is read from the newest checkpoint.
    """

    trainer: str
    fragment: int
    store: str
    spec: TrainingSpec
    deadline: float | None
    shape: Shape | None = None
    interface: str | None = None
    hang_s: float = 15.0
    handover: Handover | None = None
    samples: int = 0
    exempt_until: float | None = None
    speeds: tuple[float, ...] = ()
    interruptions_per_s: float | None = None

    @property
    def per_node(self) -> int:
        """Number of ranks on each node."""
        assert self.spec.ranks.per_node is not None  # known once the nodes are
        return self.spec.ranks.per_node


@dataclass(frozen=True)
class RankPlace:
    """The place of a process among the ranks.

    Attributes
    ----------
    rank, world_size
        This rank, from 0, and the number of ranks of the fragment.
    local_rank
        This rank on its node, from 0; determines its GPUs.
    nodes
        Number of nodes of the fragment.
    log
        File for the rank's standard output and error; its directory exists.
    address
        This node's own address in its connection to the executor; empty if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    nodes: int
    log: str
    address: str = ''
