"""The settings of a partition of Slurm, in addition to those of every batch scheduler."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta, field

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.options import BatchOptions, ClassName, Option, Word

LOWEST = 2_147_483_645  # --nice as low as Slurm accepts


Features = Annotated[
    str,
    Meta(
        pattern=r'^[\w.:+-]+([&|][\w.:+-]+)*\Z',
        description='feature names joined by & or |, without brackets or counts',
    ),
]
Form = Literal['auto', 'text', 'json']


class SlurmOptions(BatchOptions, frozen=True, kw_only=True):
    """One partition of a machine with Slurm; see also BatchOptions.

    Attributes
    ----------
    partition
        Where blocks are submitted, and whose idle nodes make the holes.
    qos
        As for sbatch; None: the user's default.
    constraint
        Features that nodes must have, as for sbatch: names with ``&`` and ``|``, without brackets.
    nice
        By how much the blocks' priority is lowered; the default is the maximum of Slurm. None: not
        asked for.
    exclusive
        Whether blocks get whole nodes.
    memory
        sbatch's ``--mem``; '0' is all memory of a node. None: not asked for.
    signal
        sbatch's ``--signal``, for sites that send it at a preemption instead of SIGTERM.
    sbatch_options, srun_options
        More options, each complete, such as ``'--licenses=scratch'``.
    node_classes
        The node classes that are told apart, by name: the features of each, written as a
        constraint, or the type of its GPUs, such as ``'gpu:a100'``. A node is of the first class
        that it fits; nodes of none are not used.
    shrink_blocks
        Whether a block is made smaller when some of its nodes are enough for a waiting job, instead
        of being given back as a whole. Slurm kills what runs there. None: where it tracks processes
        by control groups, and has an accounting database.
    form
        The form of Slurm's answers on jobs. 'auto' is text, which tells the same as JSON in less
        time; the JSON of releases before 23.02 leaves out nodes planned for a waiting job.
    """

    partition: Word
    qos: Word | None = None
    constraint: Features | None = None
    nice: Annotated[int, Meta(ge=0, le=LOWEST)] | None = LOWEST
    exclusive: bool = True
    memory: Word | None = '0'
    signal: Word | None = None
    sbatch_options: tuple[Option, ...] = ()
    srun_options: tuple[Option, ...] = ()
    node_classes: dict[ClassName, Features] = field(default_factory=dict)
    shrink_blocks: bool | None = None
    form: Form = 'auto'

    def __post_init__(self) -> None:
        for name, wanted in self.node_classes.items():
            if _GPUS.fullmatch(wanted) and not self.gpus_per_node:
                raise BadInput(
                    f'the node class {name!r} is a type of GPU ({wanted}), and gpus_per_node is 0; '
                    'it must be at least 1.'
                )

    def features(self) -> tuple[frozenset[str], ...]:
        """The constraint as a choice of sets: ``a&b|c`` is {a, b} or {c}."""
        return _choices(self.constraint or '')

    def class_of(self, features: Iterable[str]) -> str:
        """The class of a node with these features and types of GPUs; empty: none."""
        here = set(features)
        for name, wanted in self.node_classes.items():
            if any(choice <= here for choice in _choices(wanted)):
                return name
        return ''

    def constraint_on(self, node_class: str) -> str | None:
        """The ``--constraint`` of sbatch for a block of a class; empty: of any."""
        wanted = self.node_classes[node_class] if node_class else ''
        if not wanted or _GPUS.fullmatch(wanted):
            return self.constraint
        return '|'.join(
            '&'.join(dict.fromkeys([*ours.split('&'), *theirs.split('&')])).strip('&')
            for ours in (self.constraint or '').split('|')
            for theirs in wanted.split('|')
        )

    def gres_on(self, node_class: str) -> str | None:
        """The ``--gres`` of sbatch for a block of a class; empty: of any."""
        wanted = self.node_classes[node_class] if node_class else ''
        kind = wanted if _GPUS.fullmatch(wanted) else 'gpu'
        return f'{kind}:{self.gpus_per_node}' if self.gpus_per_node else None


_GPUS = re.compile(r'gpu:[\w.-]+')


def _choices(constraint: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(choice.split('&')) for choice in constraint.split('|') if choice)
