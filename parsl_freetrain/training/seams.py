"""Where tests of faults may reach into a rank; in a rank that has none, nothing happens here."""

from __future__ import annotations

from collections.abc import Callable

SAVING_STAGES = ('begin', 'written', 'manifest', 'before-commit', 'committed')
"""What a checkpoint goes through, in this order."""

on_saving: list[Callable[[str], None]] = []
"""Called in the rank that saves, with each of :data:`SAVING_STAGES` when it is reached, by the thread that writes."""


def saving(stage: str) -> None:
    """A checkpoint has reached a stage."""
    for hook in on_saving:
        hook(stage)
