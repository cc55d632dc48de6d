"""The settings of a queue of Cobalt, in addition to those of every batch scheduler."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from parsl_freetrain.sites.batch.options import BatchOptions, Line, Option, Word

Attribute = Annotated[str, Field(pattern=r'^[^\s:=\x00-\x1f]+$')]


class CobaltOptions(BatchOptions):
    """One queue of a machine with Cobalt; see also BatchOptions.

    Attributes
    ----------
    queue
        Where blocks are submitted.
    mcdram, numa
        Memory mode of KNL nodes, such as 'cache' or 'flat' and 'quad'. Only nodes in this mode
        count as part of a hole, since a change reboots them. None: any mode.
    filesystems
        As for ``--attrs filesystems=``.
    attrs
        More attributes of ``--attrs``.
    cobalt_options, aprun_options
        More options, each complete.
    """

    queue: Word
    mcdram: Attribute | None = None
    numa: Attribute | None = None
    filesystems: tuple[Attribute, ...] = ()
    attrs: dict[Attribute, Attribute] = Field(default_factory=dict)
    cobalt_options: tuple[Option, ...] = ()
    aprun_options: tuple[Line, ...] = ('-cc', 'none')

    @field_validator('requeue')
    @classmethod
    def _never(cls, value: bool) -> bool:
        if value:
            raise ValueError('Cobalt does not put jobs back into its queue')
        return value

    def modes(self) -> dict[str, str]:
        """Attributes that a node must have."""
        return {
            name: value
            for name, value in (('mcdram', self.mcdram), ('numa', self.numa))
            if value is not None
        }
