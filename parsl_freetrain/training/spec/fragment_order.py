"""The instructions for the ranks of a fragment."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.spec.training import TrainingSpec


@dataclass(frozen=True)
class Handover:
    """A state in nodes' memory, uncommitted; see :mod:`parsl_freetrain.training.loop.handover`."""

    parts: tuple[tuple[str, ...], ...]
    """Of each part, the digests of what ranks have left of it, each of which will do."""
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rehearsed:
    epoch_steps: int  #: global batches of an epoch, where a dataset has more
    steps: int  #: global batches after which it stops; with ``until``, that counts:
    until: int | None  #: number of samples with which its last step begins
    cut: int | None  #: number of samples with which the step begins after which it is stopped
    kill: bool  #: it is saved there instead, and killed in the step after the next
    trace: str  #: the file for its steps
    workers: int | None = None  #: processes of a loader; None: as the function says
    batches: str = ''  #: a folder for the batches; empty: they are not kept


@dataclass(frozen=True)
class FragmentOrder:
    trainer: str
    fragment: int  # its number, from 1
    store: str  # the trainer's checkpoint folder
    spec: TrainingSpec
    deadline: float | None = None
    """``time.monotonic()`` of a rank's node at which the nodes are taken away; None: unknown."""
    shape: Shape | None = None
    """How the ranks share the work; None: every rank trains its own samples."""
    interface: str | None = None
    """Network interface between ranks, as 'hsn0'; None: 'lo' on one node, or the host's address."""
    hang_s: float = 15.0
    """Maximum seconds until a stopped rank or an unreachable peer ends the fragment."""
    handover: Handover | None = None
    """The initial state in memory; None: it is read from the newest checkpoint."""
    samples: int = 0  # of the newest checkpoint that the executor knows
    exempt_until: float | None = None
    """The same, before which nothing preempts the fragment; None: something may."""
    speeds: tuple[float, ...] = ()
    """How fast each node is, relatively, by which virtual shards are divided. Empty: alike."""
    interruptions_per_s: float | None = None
    """How often to expect that its nodes are taken without notice; None: not known."""
    rehearsed: Rehearsed | None = None  # None: it is no rehearsal
    #: By replica and samples, what was handed in at the ends of rounds, where to and its digest.
    handed_in: tuple[tuple[int, int, str], ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.trainer, self.fragment

    def __str__(self) -> str:
        return f'Trainer {self.trainer!r}, fragment {self.fragment}'

    @property
    def per_node(self) -> int:
        assert self.spec.ranks.per_node is not None  # known once the nodes are
        return self.spec.ranks.per_node


@dataclass(frozen=True)
class RankPlace:
    rank: int
    world_size: int
    local_rank: int  # on its node; determines its GPUs
    nodes: int
    log: str  # for the rank's standard output and error; its directory exists
    address: str = ''  # this node's own, in its connection to the executor; empty if unknown
