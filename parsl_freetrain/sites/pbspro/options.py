"""The settings of a queue of PBS, in addition to those of every batch scheduler."""

from typing import Annotated

from msgspec import Meta, field

from parsl_freetrain.core.model.checked_values import AtLeast1, Seconds
from parsl_freetrain.core.model.errors import refuse
from parsl_freetrain.sites.batch.options import BatchOptions, ClassName, Line, Option, Word

LOWEST = -1024  # users may lower the priority of their jobs down to this (man qsub, -p)

PALS = ('mpiexec', '-n', '{nodes}', '--ppn', '1', '--cpu-bind', 'none')
"""HPE's launcher, for ``launch``; it starts processes on any HPE Cray machine with PBS."""

Resource = Annotated[
    str, Meta(pattern=r'^[A-Za-z_][\w.-]*\Z', description='the name of a resource of PBS')
]
Value = Annotated[
    str,
    Meta(
        pattern=r'^[^\s:+=,\x00-\x1f]+\Z',
        description='a value of a resource, without spaces and without : + = or ,',
    ),
]


class PbsOptions(BatchOptions, frozen=True, kw_only=True):
    """One queue of a machine with PBS Pro or OpenPBS; see also BatchOptions.

    Attributes
    ----------
    queue
        Where blocks are submitted.
    node_resources
        Resources of every chunk, such as ``{'system': 'polaris'}``. Only nodes that have them count
        as part of a hole.
    node_classes
        The node classes that are told apart, by name: the resources of each, such as ``{'a100':
        {'gputype': 'a100'}}``. A node is of the first class whose resources it has; nodes of none
        are not used.
    ncpus
        CPUs to ask for on each node; None: not asked for.
    place
        As for ``-l place``.
    filesystems
        As for ``-l filesystems``, where the site wants to know them.
    priority
        As for ``-p``; the default is the lowest. None: not asked for.
    withdraw_s
        As in BatchOptions; one or two scheduling cycles. Where jobs start strictly in their order,
        a block that waits makes others wait.
    grace_s
        Time between SIGTERM and SIGKILL at a preemption, the queue's ``kill_delay``, in seconds.
    launch
        Starts one process on each node, such as :data:`PALS`; ``{nodes}`` stands for their number.
        Empty: PBS's own task manager does, which needs no MPI.
    shrink_blocks
        Whether a block is made smaller (``pbs_release_nodes``) when some of its nodes are enough
        for a waiting job, instead of being given back as a whole. PBS kills what runs there. None:
        without a ``launch``, which may end all when one process is killed.
    pbs_options
        More options of qsub, each complete, such as ``'-l singularity_fakeroot=true'``.
    """

    queue: Word
    node_resources: dict[Resource, Value] = field(default_factory=dict)
    node_classes: dict[ClassName, dict[Resource, Value]] = field(default_factory=dict)
    ncpus: AtLeast1 | None = None
    place: Word = 'scatter:excl'
    filesystems: tuple[Value, ...] = ()
    priority: Annotated[int, Meta(ge=LOWEST, le=1023)] | None = LOWEST
    withdraw_s: Seconds = 30.0
    grace_s: Seconds = 10.0
    launch: tuple[Line, ...] = ()
    shrink_blocks: bool | None = None
    pbs_options: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        if self.pin_nodes:
            why = 'False: blocks on PBS ask for a number of nodes, not for names'
            refuse('pin_nodes', True, why)
