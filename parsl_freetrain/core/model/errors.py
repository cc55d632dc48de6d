"""The errors that FreeTrain raises: each says what is wrong, where, and what would be right."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parsl_freetrain.core.model.events import Action


class FreeTrainError(Exception):
    """Base of every error that FreeTrain raises itself."""


class BadInput(FreeTrainError, ValueError):
    """Something that the user gave cannot be used; raised before anything is submitted
    or started.
    """


class TrainerFailed(FreeTrainError, RuntimeError):
    """A trainer ended without reaching its total for a reason that is not an exception of the
    user's code.
    """


class DecisionFailed(FreeTrainError, RuntimeError):
    """The allocator failed to answer; ``actions`` are to be carried out all the same."""

    def __init__(self, actions: tuple[Action, ...], error: Exception) -> None:
        why = ' '.join(str(error).split()).removesuffix('.') or type(error).__name__
        super().__init__(
            f'The allocator failed: {why}. Nothing new is decided until it is asked again.'
        )
        self.actions = actions
