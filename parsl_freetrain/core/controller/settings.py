"""The controller's settings, the same in a live run and in a replay."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import field

from parsl_freetrain.core.allocation.constraints import EVERYBODY, OWNERS, check_keys
from parsl_freetrain.core.allocation.objectives import objective_named
from parsl_freetrain.core.controller.node_habits import NodeHabits
from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import RunBegan


class DecisionPolicy(Settings, frozen=True, kw_only=True):
    """The goal of decisions, and their limits.

    Attributes
    ----------
    metric
        The objective: 'throughput' (samples per second), 'speedup' (relative to one node),
        'priority' (speed-up weighted by the trainers' priorities), 'deadline', 'goodput',
        'fair_goodput', or an expression; see
        :func:`parsl_freetrain.core.allocation.objectives.objective_named`.
    horizon_s
        How far ahead a decision looks, in seconds. The paper calls it T_fwd; on Summit the
        efficiency U hardly depends on it between 60 and 300.
    trainers_at_a_time
        Maximum number of trainers that share the nodes; the others wait for their turn. None: all.
    min_rescale_s
        Minimum seconds between two rescales of one trainer; nodes that are taken do not count.
    keep_free
        Number of available nodes to leave idle.
    max_nodes
        Maximum number of nodes in use at once; None: all.
    caps
        Maximum number of nodes at once, by user or group:
        ``{'user anna': 8, 'group physics': 64}``.
    min_shares
        Minimum number of nodes, by trainer, user or group, while their trainers can use them:
        ``{'trainer unet': 2, 'group physics': 16}``. If there are too few nodes for all shares,
        shares stated first have precedence.
    budgets
        Maximum node-seconds, by trainer, user or group, or ``total`` for all trainers: ``{'user
        anna': 36e3, 'total': 1e6}``. A trainer whose budget is spent is stopped with a checkpoint
        and fails with a message that says so.
    charge_budget
        Maximum that the machine's accounts are charged for blocks, in their unit (most often
        node-hours), over all runs of this ledger. An open block counts with all that it can cost,
        so that the budget is never exceeded. When no block can be paid any more, the trainers stop
        with a checkpoint and fail with a message that says so. None: no limit.
    max_price
        Maximum price of an hour of a node, in the same unit, a queue's minimum charge included; no
        block is opened above it. None: no limit.
    retries
        Maximum number of errors in its own code after which a trainer is restarted. Preemptions do
        not count.
    habits
        How long the machine's idle nodes stay: then trainers with more nodes get those that are
        expected to stay longest, and fragments save as often as interruptions are expected.
        None: trainers keep their former nodes. See
        :func:`parsl_freetrain.replay.habits.read_habits`.
    idle_block_s
        Seconds after which an idle block is given back.
    give_back_s
        Maximum seconds that a fragment may take to save and stop when a waiting job of others needs
        its nodes; then they are given back without its last checkpoint.
    """

    metric: str = 'throughput'
    horizon_s: checked.PositiveSeconds = 120.0
    trainers_at_a_time: checked.AtLeast1 | None = None
    min_rescale_s: checked.Seconds = 0.0
    keep_free: checked.Count = 0
    max_nodes: checked.AtLeast1 | None = None
    caps: dict[str, int] = field(default_factory=dict)
    min_shares: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    charge_budget: checked.NotNegative | None = None
    max_price: checked.NotNegative | None = None
    habits: NodeHabits | None = None
    retries: checked.Count = 0
    idle_block_s: checked.SecondsOrNever = 30.0
    give_back_s: checked.Seconds = 30.0

    def __post_init__(self) -> None:
        objective_named(self.metric, 'metric')
        check_keys(self.caps, 'cap', 'nodes')
        check_keys(self.min_shares, 'minimum share', 'nodes', ('trainer', *OWNERS))
        check_keys(self.budgets, 'budget', 'node-seconds', ('trainer', *OWNERS, EVERYBODY))
        for key, share in self.min_shares.items():
            if share > self.caps.get(key, share):
                raise BadInput(
                    f'The minimum share of {key} is {share} nodes, above its cap of '
                    f'{self.caps[key]}; it must be at most the cap.'
                )
            if share > (self.max_nodes or share):
                raise BadInput(
                    f'The minimum share of {key} is {share} nodes, above max_nodes, which is '
                    f'{self.max_nodes}; it must be at most that.'
                )


class ControllerSettings(DecisionPolicy, frozen=True, kw_only=True):
    """The policy, and facts about the site, the executor and the run."""

    #: Shortest useful hole in seconds, until measured; nodes that leave sooner are not used.
    min_hole_s: checked.Seconds = 5.0
    max_blocks: checked.AtLeast1 = 32  #: maximum number of blocks that are open or queued at once
    spans_blocks: bool = True  #: whether a fragment may use nodes of several blocks
    #: Consecutive fragments that may die without progress or lost nodes before it fails.
    stalls: checked.AtLeast1 = 5
    #: Number of ordinary Parsl tasks that one node runs at once.
    workers_per_node: checked.AtLeast1 = 1
    #: Node-seconds of the budgets that were used in earlier runs, by the same keys.
    used_before: dict[str, float] = field(default_factory=dict)
    charged_before: float = 0.0  #: what earlier runs were charged; see ``charge_budget``

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys(self.used_before, 'use', 'node-seconds', ('trainer', *OWNERS, EVERYBODY))


@dataclass(frozen=True)
class DecisionSettings:
    """How a run decides: all that it takes to rebuild its controller."""

    controller: ControllerSettings
    solver: str | None  # None: an allocator that has no name
    time_limit_s: float  # of one decision

    @classmethod
    def of(cls, began: RunBegan) -> 'DecisionSettings | None':
        """Those of a recorded run; None: it has none. Raises BadInput if they cannot be read."""
        try:
            return msgspec.convert(began.settings, cls) if began.settings else None
        except ValueError as error:
            raise BadInput(f'The settings of run {began.name!r} cannot be read: {error}.') from None

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
