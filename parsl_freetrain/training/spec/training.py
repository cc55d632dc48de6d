"""What a trainer trains, and how: one record, passed from the decorator to the ranks."""

import math
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar

from msgspec import field, structs

from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import AtLeast1, Positive, Seconds
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.core.model.types import ASSUMED_RESCALE_S, Efficiency, ScalingCurve, Trainer
from parsl_freetrain.training.spec.diloco import DiLoCo, replica_name
from parsl_freetrain.training.spec.mode import Reproducible, Scaled, Throughput
from parsl_freetrain.training.spec.retention import Checkpoints
from parsl_freetrain.training.spec.shapes import Shapes, all_shapes, check_mixed, check_shapes

C = TypeVar('C', ScalingCurve, ScalingCurve | None)
Modes = Reproducible | Throughput | Scaled | DiLoCo
Sizes = Literal['auto'] | Sequence[int] | Mapping[int, Literal['auto'] | Shape | Sequence[Shape]]


class Epochs(Settings, frozen=True, kw_only=False, tag=True):
    """End training after a number of epochs.

    Attributes
    ----------
    count
        Number of epochs; may be a fraction.
    """

    count: Positive


class Samples(Settings, frozen=True, kw_only=False, tag=True):
    """End training after a number of samples.

    Attributes
    ----------
    count
        Number of samples.
    finish_by
        Deadline of the training, for ``Policy(metric='deadline')``: a datetime, or seconds since
        the epoch. The attribute is always in seconds.
    """

    count: AtLeast1
    finish_by: datetime | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.finish_by, datetime):  # without a time zone: this computer's time zone
            structs.force_setattr(self, 'finish_by', self.finish_by.timestamp())

    @property
    def finish_by_s(self) -> float | None:
        when = self.finish_by
        return when.timestamp() if isinstance(when, datetime) else when


class Ranks(Settings, frozen=True, kw_only=True):
    """The processes of a trainer on each of its nodes.

    Attributes
    ----------
    per_node
        Number of processes per node. Default: one per accelerator that a node's processes can see,
        at least 1; if a fragment's nodes have different numbers, the smallest. With shapes: what
        they say.
    threads
        Number of torch threads per process. On CPU nodes, use the number of cores divided by the
        processes per node. ``OMP_NUM_THREADS`` is ignored. Another number of threads may change the
        order of sums, so keep it for the whole training.
    ahead
        Keep one more process for each rank, which has run the function up to the first use of its
        fragment: it has loaded its data and holds its memory, on accelerators too. After a kill,
        the next fragment is made of these. By default there are some during a rescale only.
    share_devices
        Whether ``per_node`` may be more than the accelerators of a node. Ranks that share one
        exchange tensors through the CPU, with the same bits.
    """

    per_node: AtLeast1 | None = None
    threads: AtLeast1 = 1
    ahead: bool = False
    share_devices: bool = False


class Scaling(Settings, frozen=True, kw_only=True):
    """How fast training is by number of nodes, and what a change costs.

    Attributes
    ----------
    rate
        Throughput by node count, ``{1: 100.0, 2: 190.0}``, in samples per second or any unit that
        all trainers of the executor share; interpolated linearly. Default: learned while training.
        In reproducible mode the rank with the most virtual shards sets the pace, so a rate counts
        for no more than that allows: with 4 shards, 3 nodes are as fast as 2.
    class_rates
        The same for each node class, in place of ``rate``: ``{'a100': {1: 100.0}, 'a40': {1:
        40.0}}``. Nodes of other classes are not used.
    mixed
        Whether nodes of several classes may be used at once: virtual shards are divided among them
        by ``class_rates``. It needs reproducible mode, with several times as many shards as ranks;
        the rank that is done last sets the pace.
    efficiency
        Statistical efficiency by node count, ``{1: 1.0, 8: 0.8}``, for
        ``Policy(metric='goodput')``: the relative value of a sample in a batch that is spread over
        this number of nodes; interpolated linearly. Default: 1.
    rescale_up_s, rescale_down_s
        Cost of a change to more or fewer nodes, in seconds of the current rate. Default: as
        measured, and 2 before the first measurement.
    """

    rate: dict[int, float] | None = None
    class_rates: dict[str, dict[int, float]] | None = None
    mixed: bool = False
    efficiency: dict[int, float] | None = None
    rescale_up_s: Seconds | None = None
    rescale_down_s: Seconds | None = None

    def __post_init__(self) -> None:
        if self.rate and self.class_rates:
            raise BadInput('Scaling has rate and class_rates; give one of them.')
        if self.class_rates is not None and not all([self.class_rates, *self.class_rates.values()]):
            raise BadInput(
                f'Scaling: class_rates is {self.class_rates}; it must name a class, and a node '
                "count for each, as in {'a100': {1: 100.0}}."
            )
        if self.mixed and not self.class_rates:
            raise BadInput('Scaling(mixed=True) needs class_rates: shards are divided by them.')
        self.curve()
        self.class_curves()
        self.efficiency_curve()

    def curve(self) -> ScalingCurve | None:
        return ScalingCurve.from_points(self.rate) if self.rate else None

    def class_curves(self) -> tuple[tuple[str, ScalingCurve], ...]:
        rates = (self.class_rates or {}).items()
        return tuple((name, ScalingCurve.from_points(points)) for name, points in rates)

    def efficiency_curve(self) -> Efficiency | None:
        if not self.efficiency:
            return None
        nodes = tuple(sorted(self.efficiency))
        return Efficiency(nodes, tuple(self.efficiency[n] for n in nodes))


class Owner(Settings, frozen=True, kw_only=True):
    """Who owns a trainer, and its weight.

    Attributes
    ----------
    user, group
        The names whose limits in :class:`~parsl_freetrain.Policy` apply to it.
    priority
        Weight relative to 1, for ``Policy(metric='priority')``.
    """

    user: str = ''
    group: str = ''
    priority: Positive = 1.0


_LIMITS = ('min_nodes', 'max_nodes')


class TrainingSpec(Settings, frozen=True, kw_only=True):
    """What a trainer trains, and how, with all defaults filled in: as in
    :func:`~parsl_freetrain.freetrain_app`. Raises BadInput if the parts contradict each other.
    """

    min_nodes: int  #: min_nodes, max_nodes: of a fragment
    max_nodes: int
    goal: Epochs | Samples
    #: the only node counts of fragments; empty: all from minimum to maximum
    sizes: tuple[int, ...] = ()
    #: How ranks share the work, by node count, tried in this order. Empty: own samples.
    shapes: dict[int, Shapes] = field(default_factory=dict)
    mode: Reproducible | Throughput | Scaled = field(default_factory=Reproducible)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    ranks: Ranks = field(default_factory=Ranks)
    scaling: Scaling = field(default_factory=Scaling)
    owner: Owner = field(default_factory=Owner)
    diloco: DiLoCo | None = None  #: rounds of pieces, of which ``mode`` is the inner mode
    replica: int = 0  #: which one it is, from 0

    def __post_init__(self) -> None:
        if self.ranks.per_node is None and self.shapes:
            each = {s.ranks / nodes for nodes, shapes in self.shapes.items() for s in shapes}
            per_node = max(1, int(each.pop())) if len(each) == 1 else 1
            structs.force_setattr(self, 'ranks', structs.replace(self.ranks, per_node=per_node))
        stated = self.ranks.per_node or 1
        most = self.max_nodes * stated
        if isinstance(self.mode, Reproducible):
            if self.mode.shards is not None and self.mode.shards < most:
                raise BadInput(
                    f'{self.max_nodes} nodes with {stated} ranks each cannot share '
                    f'{self.mode.shards} virtual shards; shards must be at least {most}.'
                )
            if self.mode.shards is None and self.ranks.per_node is not None:
                structs.force_setattr(self, 'mode', structs.replace(self.mode, shards=most))
        if self.scaling.mixed:
            check_mixed(self.mode, self.shapes, ahead=self.ranks.ahead)
        check_shapes(self.shapes, self.mode, stated)
        if self.diloco is not None:
            self.diloco.check(self)

    @classmethod
    def of(
        cls,
        *,
        min_nodes: int | None,
        max_nodes: int | None,
        sizes: Sizes | None,
        total_epochs: float | None,
        total_samples: int | None,
        goal: Epochs | Samples | None,
        mode: Modes,
        ranks: Ranks,
        **others: Any,
    ) -> 'TrainingSpec':
        """From the decorator's arguments. Raises BadInput if they contradict each other."""
        diloco = mode if isinstance(mode, DiLoCo) else None
        mode = mode.inner if isinstance(mode, DiLoCo) else mode
        goals: list[Epochs | Samples] = [] if goal is None else [goal]
        goals += [] if total_epochs is None else [Epochs(total_epochs)]
        goals += [] if total_samples is None else [Samples(total_samples)]
        if len(goals) != 1:
            raise BadInput(
                f'{len(goals)} of total_epochs, total_samples and goal are given; give one of them.'
            )
        stated = () if sizes is None or isinstance(sizes, str) else sizes
        if sizes is not None and not isinstance(sizes, str) and (not sizes or min(sizes) < 1):
            raise BadInput(f'sizes is {sizes}; it must have node counts, each at least 1.')
        counts = tuple(sorted(set(stated)))
        low = min(counts, default=1) if min_nodes is None else min_nodes
        high = max(counts, default=1) if max_nodes is None else max_nodes
        if sizes == 'auto':
            sizes = dict.fromkeys(range(low, high + 1), 'auto')
        by_count: dict[int, Shapes] = {}
        each = ranks.per_node or 1
        for count, shapes in sizes.items() if isinstance(sizes, Mapping) else ():
            if isinstance(shapes, str):
                by_count[count] = all_shapes(count * each, mode, high * each)
            else:
                by_count[count] = (shapes,) if isinstance(shapes, Shape) else tuple(shapes)
        return cls(
            min_nodes=low,
            max_nodes=high,
            sizes=counts,
            shapes=by_count,
            goal=goals[0],
            mode=mode,
            ranks=ranks,
            diloco=diloco,
            **others,
        )

    def options(self, instead_of: Container[str]) -> dict[str, Any]:
        """The decorator's arguments that make it, but for what others are given in place of."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        found['sizes'] = found.pop('shapes') or found['sizes'] or None
        found['mode'] = found.pop('diloco') or found['mode']
        del found['replica']
        for own, *others in (('goal', 'total_epochs', 'total_samples'), ('sizes', *_LIMITS)):
            if any(name in instead_of for name in others):
                del found[own]
        if 'sizes' in instead_of:
            found = {name: value for name, value in found.items() if name not in _LIMITS}
        return found

    def seeded(self, seed: int) -> Modes:
        mode = structs.replace(self.mode, seed=seed)
        return mode if self.diloco is None else structs.replace(self.diloco, inner=mode)

    @property
    def total_samples(self) -> int | None:
        """None: depends on the dataset."""
        return self.goal.count if isinstance(self.goal, Samples) else None

    @property
    def total_epochs(self) -> float | None:
        """None if a number of samples is given."""
        return self.goal.count if isinstance(self.goal, Epochs) else None

    @property
    def sharded(self) -> bool:
        """Whether a shape divides the parameters. Then all ranks write checkpoints in any shape."""
        return any(shape.sharded for shapes in self.shapes.values() for shape in shapes)

    @property
    def shards(self) -> int:
        """Virtual shards of the global batch; 0: none, or not known before the nodes are."""
        return (self.mode.shards or 0) if isinstance(self.mode, Reproducible) else 0

    def ranks_on(self, accelerators: Sequence[int]) -> int:
        """Ranks on each node, given the accelerators of each: as stated; else one per accelerator
        of the node with the fewest, but no more than virtual shards.
        """
        if self.ranks.per_node is not None:
            return self.ranks.per_node
        fewest = max(1, min(accelerators, default=0))
        return min(fewest, self.shards // self.max_nodes) if self.shards else fewest

    def with_ranks(self, per_node: int) -> 'TrainingSpec':
        """With a known number of ranks per node, and so of virtual shards."""
        return structs.replace(self, ranks=structs.replace(self.ranks, per_node=per_node))

    def trainer(self, name: str, function: str = '') -> Trainer:
        """What decisions need; BadInput if the trainer can never run."""
        scaling, owner = self.scaling, self.owner
        costs = {'up': scaling.rescale_up_s, 'down': scaling.rescale_down_s}
        up_s, down_s = (ASSUMED_RESCALE_S if s is None else s for s in costs.values())
        replicas = self.diloco.replicas if self.diloco is not None else 0
        shards = self.shards // (self.ranks.per_node or 1)
        return Trainer(
            replica_name(name, self.replica),
            self.min_nodes,
            self.max_nodes,
            total_samples=self.total_samples,
            curve=self._capped(scaling.curve()),
            rescale_up_s=up_s,
            rescale_down_s=down_s,
            priority=owner.priority,
            sizes=self.sizes,
            finish_by_s=self.goal.finish_by_s if isinstance(self.goal, Samples) else None,
            efficiency=scaling.efficiency_curve(),
            user=owner.user,
            group=owner.group,
            stated_costs=tuple(way for way, seconds in costs.items() if seconds is not None),
            function=function,
            shapes=tuple(
                (nodes, tuple(map(str, shapes))) for nodes, shapes in sorted(self.shapes.items())
            ),
            class_curves=tuple(
                (name, curve if scaling.mixed else self._capped(curve))
                for name, curve in scaling.class_curves()
            ),
            mixed_parts=shards or self.max_nodes if scaling.mixed else 0,
            training=name if replicas else '',
            replicas=max(replicas, 1),
            overlap=self.diloco.overlap if self.diloco is not None else 0,
        )

    def _capped(self, curve: C) -> C:
        """``curve``, where it is not above what the rank with the most virtual shards allows."""
        if curve is None or self.shapes or not isinstance(self.mode, Reproducible):
            return curve
        ranks = self.ranks.per_node or 1
        shards = self.shards or self.max_nodes * ranks
        one, *_ = [n for n, rate in zip(curve.nodes, curve.rate, strict=True) if rate] or [1]
        most = {n: math.ceil(shards / (n * ranks)) for n in (one, *range(1, self.max_nodes + 1))}
        limits = {n: curve.rate_at(one) * most[one] / shards for n, shards in most.items()}
        if all(curve.rate_at(n) <= limit for n, limit in limits.items()):
            return curve
        return ScalingCurve.from_points({n: min(curve.rate_at(n), limits[n]) for n in limits})
