"""The errors that FreeTrain raises: each says what is wrong, where, and what would be right."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class FreeTrainError(Exception):
    """Base of every error that FreeTrain raises itself; ``final``: another try would end in it."""

    final = False


class BadInput(FreeTrainError, ValueError):
    """Something that the user gave cannot be used; raised before anything is submitted."""


def refuse(what: str, value: object, must: str) -> NoReturn:
    """Raise BadInput: "Ranks: per_node is 0; it must be at least 1." (what, value, must)."""
    raise BadInput(f'{what} is {shown(value)}; it must be {must}.')


# Packages that have another name than what is imported.
_PACKAGES = {'globus_compute_sdk': 'globus-compute-sdk', 'mlflow': 'mlflow-skinny'}


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Around imports of what not every user has. Raises BadInput if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or '').partition('.')[0]
        raise BadInput(
            f'{what} needs {name}, which is not installed: pip install {_PACKAGES.get(name, name)}.'
        ) from error


@contextmanager
def of_file(what: str, remedy: str) -> Iterator[None]:
    """Around work on a file: BadInput says ``what``, the system's reason, and the remedy."""
    try:
        yield
    except OSError as error:
        raise BadInput(f'{what} ({error.strerror or error}); {remedy}.') from error


@contextmanager
def of_user(what: str) -> Iterator[None]:
    """Around code of the user's: BadInput says ``what``, and then how it failed."""
    try:
        yield
    except FreeTrainError:
        raise
    except Exception as error:
        raise BadInput(f'{what}: {type(error).__name__}: {error}.') from error


def shown(value: object) -> str:
    """A value for a sentence, without control characters and not too long."""
    text = repr(value)
    return text if len(text) <= 200 else f'{text[:197]}...'


def clean(text: str, keep: str = '') -> str:
    """A text of others, without what controls a terminal or the direction of text."""
    return ''.join(c if c.isprintable() or c in keep else '?' for c in text)


def nodes_text(count: int) -> str:
    return '1 node' if count == 1 else f'{count} nodes'


class TrainerFailed(FreeTrainError, RuntimeError):
    """A trainer ended before its total, not by an exception of the user's code."""
