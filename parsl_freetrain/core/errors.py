"""The errors that FreeTrain raises: sentences that say what is wrong, where, and what would be right."""

from __future__ import annotations


class FreeTrainError(Exception):
    """Base of every error that FreeTrain raises itself."""


class BadInput(FreeTrainError, ValueError):
    """Something that the user gave cannot be used; raised before anything is submitted or started."""


class TrainerFailed(FreeTrainError, RuntimeError):
    """A trainer ended without reaching its total for a reason that is not an exception of the user's code."""
