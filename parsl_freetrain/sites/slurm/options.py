"""The settings of a partition of Slurm, in addition to those of every batch scheduler."""

from __future__ import annotations

import re
from enum import StrEnum

from pydantic import Field, field_validator

from parsl_freetrain.sites.batch.options import BatchOptions, Option, Word

# --nice as low as Slurm accepts.
LOWEST = 2_147_483_645


class Form(StrEnum):
    """The form of Slurm's answers.

    AUTO is JSON if the documents of this version have all that is needed, and text otherwise.
    """

    AUTO = 'auto'
    TEXT = 'text'
    JSON = 'json'


class SlurmOptions(BatchOptions):
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
    shrink_blocks
        Whether a block is made smaller when some of its nodes are enough for a waiting job, instead
        of being given back as a whole. Slurm kills what runs there: only for clusters that track
        processes by control groups (``ProctrackType=proctrack/cgroup``).
    form
        The form of Slurm's answers: 'auto', 'text' or 'json'.
    """

    partition: Word
    qos: Word | None = None
    constraint: Word | None = None
    nice: int | None = Field(LOWEST, ge=0, le=LOWEST)
    exclusive: bool = True
    memory: Word | None = '0'
    signal: Word | None = None
    sbatch_options: tuple[Option, ...] = ()
    srun_options: tuple[Option, ...] = ()
    shrink_blocks: bool = False
    form: Form = Form.AUTO

    @field_validator('constraint')
    @classmethod
    def _simple(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r'[\w.:+-]+([&|][\w.:+-]+)*', value):
            raise ValueError(
                'it must be feature names joined by & or |, without brackets or counts'
            )
        return value

    def features(self) -> tuple[frozenset[str], ...]:
        """The constraint as a choice of sets: ``a&b|c`` is {a, b} or {c}."""
        return (
            tuple(frozenset(choice.split('&')) for choice in self.constraint.split('|'))
            if self.constraint
            else ()
        )
