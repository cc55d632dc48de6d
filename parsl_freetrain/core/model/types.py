"""The basic words as frozen dataclasses; docs/glossary.md explains them."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any

from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.errors import BadInput, refuse

_NEARLY = 1e-9  # of a rounding error in a number of parts


def deal(parts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Parts for each worker such that the last is done soonest; first ones get more."""
    share = parts / sum(speeds)
    counts = [math.floor(share * speed + _NEARLY) for speed in speeds]
    heap = [((n + 1) / speed, i) for i, (n, speed) in enumerate(zip(counts, speeds, strict=True))]
    heapify(heap)
    for _ in range(parts - sum(counts)):
        _, i = heap[0]
        counts[i] += 1
        heapreplace(heap, ((counts[i] + 1) / speeds[i], i))
    return tuple(counts)


@lru_cache(maxsize=1 << 16)
def rate_together(parts: int, workers: tuple[tuple[float, int], ...]) -> float:
    """The rate of workers who divide a batch by :func:`deal`: by speed, how many have it."""
    speeds = [speed for speed, count in workers for _ in range(count)]
    return parts / max(n / speed for n, speed in zip(deal(parts, speeds), speeds, strict=True))


ASSUMED_RESCALE_S = 2.0
"""Assumed cost of a rescale until it is stated or measured, in seconds of the current rate."""


@dataclass(frozen=True)
class Charge:
    """What nodes of a queue cost, in the unit of the machine's accounts."""

    price: float = 0.0  #: of a node for an hour
    #: ``least_price`` an hour and node for the first ``least_s`` seconds, even if it ends before.
    least_s: float = 0.0
    least_price: float = 0.0

    def cost(self, nodes: int, lasts_s: float) -> float:
        """What a block of this number of nodes costs that lasts for ``lasts_s`` seconds."""
        later_s = max(0.0, lasts_s - self.least_s)
        later = later_s * self.price if self.price else 0.0  # also if it lasts for ever
        return nodes / 3600 * (self.least_s * self.least_price + later)


FREE = Charge()


@dataclass(frozen=True)
class Hole:
    """Nodes that the scheduler cannot use before some time."""

    nodes: int  #: number of nodes
    #: When they are needed again, in seconds of the events' clock; None: until preempted.
    until_s: float | None = None
    queue: str = ''  #: where a block for this hole is submitted
    names: tuple[str, ...] = ()  #: the nodes' names, empty where the scheduler chooses them
    node_class: str = ''  #: the kind of its nodes, such as 'a100', at a site that tells them apart
    charge: Charge = field(default=FREE, compare=False)  #: what its nodes cost
    #: Maximum seconds that a block for it lasts; None: as long as the hole.
    longest_s: float | None = field(default=None, compare=False)
    #: Seconds after the start of its block in which nothing preempts it.
    exempt_s: float = field(default=0.0, compare=False)

    def lasts_s(self, at: float) -> float:
        """Maximum seconds of a block that is opened for it at that time; infinite: unknown."""
        ends = (None if self.until_s is None else self.until_s - at, self.longest_s)
        return min((end for end in ends if end is not None), default=math.inf)

    def price(self, at: float) -> float:
        """What an hour of a node costs in such a block that is kept to its end."""
        lasts_s = self.lasts_s(at)
        if lasts_s == math.inf:
            return self.charge.price
        return self.charge.cost(1, lasts_s) * 3600 / max(lasts_s, 1.0)


CORRECTED_S = 30.0  # a scheduler corrects the end of a block that has just started by no more


@dataclass(frozen=True)
class BlockRequest:
    """One batch job, sized to fill one hole."""

    nodes: int  #: number of nodes to ask for
    walltime_s: float | None = None  #: walltime in seconds; None where the site needs none
    queue: str = ''  #: with ``names``, ``node_class``, ``charge``, ``exempt_s``: as in the hole
    names: tuple[str, ...] = ()
    #: Names of nodes with broken devices to do without; not on PBS Pro and Cobalt.
    avoid: tuple[str, ...] = ()
    node_class: str = ''
    charge: Charge = field(default=FREE, compare=False)
    #: Maximum seconds for which it is charged; infinite: unknown.
    lasts_s: float = field(default=math.inf, compare=False)
    exempt_s: float = field(default=0.0, compare=False)

    def check(self) -> None:
        """BadInput unless it is for at least one node, and as many as it names, if any."""
        if self.nodes < 1 or len(self.names) not in (0, self.nodes):
            must = 'for at least one node, with as many names as nodes, or none'
            refuse(f'A block of {self.nodes} nodes, names', list(self.names), must)


def _check_points(
    what: str, nodes: Sequence[int], values: Sequence[float], each: str, *, first: int
) -> None:
    if len(nodes) != len(values) or not nodes:
        raise BadInput(
            f'{what.capitalize()} needs one {each} for each node count, and at least one: got '
            f'{len(nodes)} node counts and {len(values)} {each}s.'
        )
    if nodes[0] < first or any(b <= a for a, b in pairwise(nodes)):
        raise BadInput(
            f'The node counts of {what} must increase from {first} on: got {list(nodes)}.'
        )


@dataclass(frozen=True)
class ScalingCurve:
    """Training speed against nodes: linear between points, 0 at 0 nodes, flat behind the last."""

    nodes: tuple[int, ...]  #: node counts, strictly increasing
    rate: tuple[float, ...]  #: samples per second (or any unit proportional to it) at each count

    def __post_init__(self) -> None:
        _check_points('a scaling curve', self.nodes, self.rate, 'rate', first=0)
        if any(not math.isfinite(r) or r < 0 for r in self.rate):
            refuse('The rate of a scaling curve', list(self.rate), 'finite and not negative')
        if self.nodes[0] == 0 and self.rate[0] != 0:
            raise BadInput(f'The rate of a scaling curve at 0 nodes must be 0: got {self.rate[0]}.')

    @classmethod
    def from_points(cls, points: dict[int, float]) -> 'ScalingCurve':
        """The curve through ``{nodes: rate}``, in any order; the point (0, 0) is implied."""
        ordered = sorted(({0: 0.0} | {int(n): float(r) for n, r in points.items()}).items())
        return cls(tuple(n for n, _ in ordered), tuple(r for _, r in ordered))

    def rate_at(self, nodes: int) -> float:
        """Rate on ``nodes`` nodes, in the curve's unit."""
        if nodes <= 0:
            return 0.0
        i = bisect_left(self.nodes, nodes)
        if i == len(self.nodes):
            return self.rate[-1]
        if self.nodes[i] == nodes:
            return self.rate[i]
        left_n, left_r = (self.nodes[i - 1], self.rate[i - 1]) if i else (0, 0.0)
        return left_r + (self.rate[i] - left_r) * (nodes - left_n) / (self.nodes[i] - left_n)


@dataclass(frozen=True)
class Efficiency:
    """By node count: how much a sample contributes when the batch is spread over more nodes."""

    nodes: tuple[int, ...]  #: node counts, strictly increasing
    #: Between 0 and 1 at each count; linear in between, flat before the first and behind the last.
    value: tuple[checked.Share, ...]

    def __post_init__(self) -> None:
        _check_points('statistical efficiency', self.nodes, self.value, 'value', first=1)
        checked.check_fields('Statistical efficiency', self)

    def at(self, nodes: int) -> float:
        i = bisect_left(self.nodes, nodes)
        if i == 0 or i == len(self.nodes):
            return self.value[min(i, len(self.nodes) - 1)]
        left, right = self.nodes[i - 1], self.nodes[i]
        share = (nodes - left) / (right - left)
        return self.value[i - 1] + (self.value[i] - self.value[i - 1]) * share


@dataclass(frozen=True)
class Trainer:
    """One training job, as its user described it."""

    name: str  #: unique within a run; also the name of its checkpoint folder
    #: With ``max_nodes``: minimum and maximum number of nodes of a running fragment.
    min_nodes: checked.AtLeast1
    max_nodes: int
    #: Total number of samples to train; None while only the number of epochs is known.
    total_samples: checked.AtLeast1 | None = None
    curve: ScalingCurve | None = None  #: the scaling curve, where the user stated one
    #: With ``rescale_down_s``: seconds of the current rate for a change, until measured.
    rescale_up_s: checked.Seconds = ASSUMED_RESCALE_S
    rescale_down_s: checked.Seconds = ASSUMED_RESCALE_S
    priority: checked.Positive = 1.0  #: weight relative to 1, for objectives that use it
    #: The allowed node counts; empty: every count from ``min_nodes`` to ``max_nodes``.
    sizes: tuple[int, ...] = ()
    #: When it should be finished, by the events' clock; None: no deadline.
    finish_by_s: checked.Number | None = None
    #: Statistical efficiency by nodes, for objectives that use it; None: 1 at every count.
    efficiency: Efficiency | None = None
    #: With ``group``: the owners whose caps, shares and budgets hold for it; empty: nobody's.
    user: str = ''
    group: str = ''
    #: The rescale costs that the user has stated, 'up' or 'down'. They hold whatever is measured.
    stated_costs: tuple[str, ...] = ()
    #: What it trains: those of one function scale alike until measured. Empty: like no other.
    function: str = ''
    #: The names of the shapes by node count, in the order in which they are tried.
    shapes: tuple[tuple[int, tuple[str, ...]], ...] = ()
    #: By node class, in place of ``curve``; it does not use nodes of other classes.
    class_curves: tuple[tuple[str, ScalingCurve], ...] = ()
    #: Above 0: parts of a batch for each rank, divided by speed among nodes of several classes.
    mixed_parts: int = 0
    #: With ``replicas``, ``round_samples`` (of all; None: not known), and ``overlap``, the rounds
    #: that it may be ahead of others: its place in a training.
    training: str = ''
    replicas: checked.AtLeast1 = 1
    round_samples: checked.AtLeast1 | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        checked.check_fields(f'Trainer {self.name!r}', self)
        if self.max_nodes < self.min_nodes:
            raise BadInput(
                f'Trainer {self.name!r}: min_nodes is {self.min_nodes} and max_nodes '
                f'{self.max_nodes}; max_nodes must be at least min_nodes.'
            )
        if self.sizes and not self.counts():
            raise BadInput(
                f'Trainer {self.name!r}: none of its sizes {list(self.sizes)} is from min_nodes '
                f'to max_nodes, {self.min_nodes} to {self.max_nodes}; one of them must be.'
            )
        for node_class, curve in {'': self.curve, **dict(self.class_curves)}.items():
            if curve and not any(curve.rate_at(n) > 0 for n in self.counts()):
                on_class = f' on {node_class}' if node_class else ''
                raise BadInput(
                    f'Trainer {self.name!r}: its scaling curve{on_class} has rate 0 at every count '
                    f'from {self.min_nodes} to '
                    f'{self.max_nodes} nodes; at one of them it must be above 0.'
                )

    def ahead(self, samples: int) -> int:
        """How many rounds it may be ahead of other replicas there: none at the end."""
        return self.overlap if samples != self.total_samples else 0

    def left_of_round(self, samples: int) -> tuple[int, float]:
        """The rounds that it has ended, and its own samples until it ends one more."""
        rounds, done = divmod(samples, self.round_samples or math.inf)
        return int(rounds), ((self.round_samples or math.inf) - done) / self.replicas

    def curve_on(self, node_class: str) -> ScalingCurve | None:
        """The scaling curve on a class; None if it is not known, or the class is not used."""
        return dict(self.class_curves).get(node_class) if self.class_curves else self.curve

    def uses(self, node_class: str) -> bool:
        return not self.class_curves or node_class in dict(self.class_curves)

    def counts(self) -> Sequence[int]:
        if not self.sizes:
            return range(self.min_nodes, self.max_nodes + 1)
        return [n for n in sorted(set(self.sizes)) if self.min_nodes <= n <= self.max_nodes]


@dataclass(frozen=True)
class NodeOffer:
    """A node was idle for us from ``start`` to ``end``, in epoch seconds; infinite: it still is."""

    node: str
    start: float
    end: float


@dataclass(frozen=True)
class Checkpoint:
    """A handle to a committed state of a trainer; never the tensors themselves."""

    trainer: str  #: whose state it is
    path: str  #: the checkpoint's own directory; empty for the state before the first step
    samples: int  #: training samples that the state has seen
    fragment: int  #: the fragment that wrote it; 0 for the state before the first step
    #: The last values given to ``ctx.report``.
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    #: What the function returned at the end of the training, as JSON knows it; else None.
    result: Any = field(default=None, compare=False)
    #: When it was committed, in seconds since the epoch; 0: unknown, as what follows.
    at: float = field(default=0.0, compare=False)
    #: How long writing it took, as long as a stop may take.
    seconds: float = field(default=0.0, compare=False)
    #: Seconds that training stood still: to copy the state, or to collect and write it.
    pause_s: float = field(default=0.0, compare=False)
    #: How often it went on after a cut, and its first step proved that nothing was lost.
    resumes: int = field(default=0, compare=False)
    verified: int = field(default=0, compare=False)
    #: At a round's end: by what key and digest other sites get it; empty: they need not.
    handed_in: str = field(default='', compare=False)
    #: Of a result: the best kept checkpoint, by ``best=``; None: there is none.
    best: 'Checkpoint | None' = field(default=None, compare=False)

    @property
    def pause(self) -> tuple[float, float]:
        """When training stood still for it: while writing if it had to wait, else before."""
        until = self.at if self.pause_s >= self.seconds else self.at - self.seconds
        return until - self.pause_s, until


@dataclass(frozen=True)
class Progress:
    """The progress of a trainer."""

    samples: int = 0  #: samples trained so far
    total_samples: int | None = None  #: None while only the number of epochs is known
    nodes: int = 0  #: nodes that its fragment holds now
    fragments: int = 0  #: in this run
    preempted: int = 0  #: preempted fragments in this run
    rescaled: int = 0  #: changes of the node count in this run
    #: The last values given to ``ctx.report``.
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeDemand:
    """A job of others (or a reservation, or a drain) that would start if we gave nodes back."""

    job: str  # its id, or 'reservation' and its name, or 'drained' and the nodes
    nodes: int  # how many of ours it lacks
    among: frozenset[str]  # our nodes that would serve it
    # of these, what a reservation or a planned job takes later: fewer jobs could use them
    spare: frozenset[str] = frozenset()
    # giving back is enough: another job is planned around them, they may serve others
    shared: bool = False
    # of these, what the scheduler would give first if blocks had none: later jobs find the others
    first: frozenset[str] = field(default=frozenset(), compare=False)


def in_need(jobs: Iterable[str]) -> str:
    """The :attr:`NodeDemand.job` of several demands in words, each once."""
    named = (
        job if job.startswith(('reservation ', 'drained ')) else f'job {job}'
        for job in sorted(set(jobs))
    )
    return ', '.join(named)


@dataclass(frozen=True)
class BlockNodes:
    block: str
    nodes: tuple[str, ...]
    releasable: frozenset[str] = frozenset()  # while the block goes on
    leaving: bool = False  # the scheduler takes them already
