"""The settings that all batch schedulers share: which blocks are asked for, and how often."""

from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from parsl_freetrain.core.model import checked_values as checked
from parsl_freetrain.core.model.checked_settings import Settings, read_settings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Charge

Word = Annotated[
    str, Meta(pattern=r'^[^\s\x00-\x1f]+\Z', description='a text without spaces, not empty')
]
Line = Annotated[str, Meta(pattern=r'^[^\n\r\x00]+\Z', description='a line of text, not empty')]
Option = Annotated[
    str,
    Meta(
        pattern=r'^-[^\n\r\x00]*\Z',
        description='an option, each as one text, such as "--licenses=scratch" or '
        '"-l place=scatter"',
    ),
]
ClassName = Annotated[
    str, Meta(pattern=r'^[A-Za-z0-9][A-Za-z0-9_-]*\Z', description='a name of letters and digits')
]
Minute = Annotated[
    float, Meta(ge=60, le=checked.MAX, description='a number of seconds, 60 or more')
]

POLL_S = 12.0  # with what is asked seldom, six questions in a minute


class BatchOptions(Settings, frozen=True, kw_only=True):
    """The settings of one queue that all batch schedulers share; times in seconds.

    Attributes
    ----------
    mode
        'backfill': blocks end before their nodes are needed. 'preemptible': the scheduler may also
        preempt them.
    account
        The account that pays; None: the user's default.
    gpus_per_node
        GPUs to ask for on each node.
    requeue
        Whether a preempted block goes back to the queue instead of ending.
    worker_init
        Shell lines at the beginning of each block.
    shrink
        The minimum share of its walltime with which the scheduler may start a block.
    shortest_s
        Minimum walltime of a block.
    longest_s
        Walltime of blocks where nothing is planned; None: 300 in backfill mode, where a job
        waits so long if this process cannot give nodes back, and 3600 in preemptible mode.
    least_nodes, most_nodes
        Minimum and maximum number of nodes of a block, in addition to the queue's limits.
    margin_s
        How long before its nodes are needed a block ends itself.
    ending_s
        How long before its time limit a block ends itself; the scheduler would end it too late.
        This is part of ``margin_s``.
    start_s
        How long the scheduler may take to start a job that fits; what was measured at the last
        blocks is used instead if it is less.
    withdraw_s
        How long a block may wait in the queue, and no longer than its hole lasts; then it is
        withdrawn.
    max_waiting
        Maximum number of blocks that wait in the queue.
    submit_every_s
        Minimum time between two submissions.
    poll_s
        Time between two questions to the scheduler.
    waiting_poll_s
        Used in place of ``poll_s``, if less, in backfill mode while jobs of others wait that could
        use nodes of blocks; None: 4, and ``poll_s`` if that is above its default.
    longest_backoff_s
        Maximum time between two questions after failures, while no block is open; each failure
        doubles the time.
    command_s
        Maximum time that a command of the scheduler may take to answer.
    unreachable_s
        After this time without an answer, blocks count as unreachable; before, as last seen.
    pin_nodes
        Whether to ask for the very nodes that were seen idle, instead of for their number.
    spans_blocks
        Whether one fragment may use nodes of several blocks.
    exempt_s
        Seconds after its start in which a block is not preempted.
    price
        What a node costs for an hour, in the unit of the machine's accounts.
    least_charge_s, least_charge_price
        Every node costs ``least_charge_price`` an hour for the first ``least_charge_s`` seconds,
        also if its block ends before.
    interface
        The network interface that ranks use, and at which the submitting process listens if its
        computer has one of this name. None: each node uses the one by which it reaches the
        submitting process.
    """

    mode: Literal['backfill', 'preemptible'] = 'backfill'
    account: Word | None = None
    gpus_per_node: checked.Count = 0
    requeue: bool = False
    worker_init: str = ''
    shrink: Annotated[float, Meta(gt=0, le=1, description='a number above 0, at most 1')] = 0.5
    shortest_s: Annotated[
        float, Meta(ge=1, le=checked.MAX, description='a number of seconds, 1 or more')
    ] = 60.0
    least_nodes: checked.AtLeast1 = 1
    most_nodes: checked.AtLeast1 | None = None
    longest_s: Minute | None = None
    margin_s: checked.Seconds = 15.0
    ending_s: checked.Seconds = 10.0
    start_s: checked.Seconds = 30.0
    withdraw_s: checked.Seconds = 120.0
    max_waiting: checked.AtLeast1 = 4
    submit_every_s: checked.Seconds = 2.0
    poll_s: checked.PositiveSeconds = POLL_S
    waiting_poll_s: checked.PositiveSeconds | None = None
    longest_backoff_s: checked.PositiveSeconds = 300.0
    command_s: checked.PositiveSeconds = 10.0
    unreachable_s: checked.Seconds = 60.0
    pin_nodes: bool = False
    spans_blocks: bool = True
    exempt_s: checked.Seconds = 0.0
    price: checked.NotNegative = 1.0
    least_charge_s: checked.Seconds = 0.0
    least_charge_price: checked.NotNegative = 0.0
    interface: Word | None = None

    @property
    def preemptible(self) -> bool:
        return self.mode == 'preemptible'

    @property
    def fast_poll_s(self) -> float:
        """Between questions while somebody could use nodes; long if they are taken anyway."""
        if self.preemptible:
            return self.poll_s
        unsaid = 4.0 if self.poll_s <= POLL_S else self.poll_s
        return min(self.poll_s, self.waiting_poll_s or unsaid)

    @property
    def unplanned_s(self) -> float:
        """Walltime of blocks where nothing is planned."""
        return self.longest_s or (3600.0 if self.preemptible else 300.0)

    @property
    def classes(self) -> tuple[str, ...]:
        """The node classes that are told apart, in the order in which nodes are compared."""
        return tuple(getattr(self, 'node_classes', ()))

    @property
    def limit_margin_s(self) -> float:
        """How long before its nodes are needed a block's time limit ends, at least."""
        return max(0.0, self.margin_s - self.ending_s)

    @property
    def charge(self) -> Charge:
        return Charge(self.price, self.least_charge_s, self.least_charge_price)


Kind = TypeVar('Kind', bound=BatchOptions)


def given_options(
    kind: type[Kind], site: str, options: Kind | None, settings: dict[str, object]
) -> Kind:
    """Options, or settings as such; BadInput for both, or what cannot be used."""
    if options is not None and settings:
        both = f'options and the settings {", ".join(settings)}'
        raise BadInput(f'{site} was given {both}; give one or the other.')
    return read_settings(kind, site, settings) if options is None else options
