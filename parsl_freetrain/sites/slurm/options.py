"""What a site config says about a Slurm machine beside what holds for every batch scheduler."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from pydantic import Field, field_validator

from parsl_freetrain.sites.batch.options import BatchOptions, Line, Mode, Word, options_from, read_table

__all__ = ['Form', 'Mode', 'SlurmOptions', 'read_options']

# --nice as low as Slurm accepts.
LOWEST = 2_147_483_645


class Form(StrEnum):
    """How answers are asked for; auto: JSON where the version's documents tell all that is needed, else text."""

    AUTO = 'auto'
    TEXT = 'text'
    JSON = 'json'


class SlurmOptions(BatchOptions):
    """One partition of a Slurm machine, and how blocks are asked for there; see also BatchOptions.

    Attributes
    ----------
    partition
        Where blocks are submitted, and whose idle nodes make the holes.
    qos
        As for sbatch; None: the user's default.
    constraint
        Features that nodes must have, as for sbatch: names with ``&`` and ``|``, without brackets.
    nice
        How much lower than usual the blocks' priority is; the default is the lowest that Slurm has.
    exclusive, memory
        Whole nodes; sbatch's ``--mem``, where '0' is all of it, and None leaves it out.
    signal
        sbatch's ``--signal``, for sites that send it at a preemption instead of SIGTERM.
    sbatch_options, srun_options
        More options, each complete, such as ``'--licenses=scratch'``.
    form
        How answers are asked for.
    """

    partition: Word
    qos: Word | None = None
    constraint: Word | None = None
    nice: int | None = Field(LOWEST, ge=0, le=LOWEST)
    exclusive: bool = True
    memory: Word | None = '0'
    signal: Word | None = None
    sbatch_options: tuple[Line, ...] = ()
    srun_options: tuple[Line, ...] = ()
    form: Form = Form.AUTO

    @field_validator('constraint')
    @classmethod
    def _simple(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r'[\w.:+-]+([&|][\w.:+-]+)*', value):
            raise ValueError('it must be feature names joined by & or |, without brackets or counts')
        return value

    @field_validator('sbatch_options', 'srun_options')
    @classmethod
    def _whole_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if strange := [option for option in value if not option.startswith('-')]:
            raise ValueError(f'{strange[0]!r} is not an option; write each as one text, such as "--licenses=scratch"')
        return value

    def features(self) -> tuple[frozenset[str], ...]:
        """The constraint as a choice of sets: ``a&b|c`` is {a, b} or {c}."""
        return tuple(frozenset(choice.split('&')) for choice in self.constraint.split('|')) if self.constraint else ()


def read_options(path: str | Path) -> SlurmOptions:
    """Options from a TOML file, at its top level or in its table ``[slurm]``.

    Raises
    ------
    BadInput
        The file cannot be read, is no TOML, or has settings that cannot be used.
    """
    values = read_table(path)
    table = values.get('slurm', values)
    return options_from(SlurmOptions, f'The site file {path}', table if isinstance(table, dict) else values)
