"""Hooks for tests of faults inside a rank. Without such tests they do nothing."""

from collections.abc import Callable

SAVING_STAGES = (
    'begin', 'part-begun', 'part-data', 'part-written', 'written', 'manifest', 'before-commit',
    'committed',
)  # fmt: skip
"""The stages of saving a checkpoint, in order. Each rank that writes passes 'begin' and those of
its part. There is also 'leaving': a rank begins to leave its state in memory.
"""

on_saving: list[Callable[[str], None]] = []
"""Functions that the writing thread calls with each of :data:`SAVING_STAGES` as it is reached."""


def saving(stage: str) -> None:
    for hook in on_saving:
        hook(stage)
