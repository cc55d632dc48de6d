"""A quicker import of Parsl, for processes that only relay tasks or run them."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import typeguard


def import_parsl() -> None:
    """Import Parsl without what these processes do not use: its monitoring database, which takes
    half of the time where SQLAlchemy is installed, and the code that checks the types of
    constructors' arguments, which is generated anew at every import and takes half of the rest.
    """
    hidden = 'sqlalchemy' not in sys.modules
    if hidden:
        sys.modules['sqlalchemy'] = None  # type: ignore[assignment]
    with mock.patch.object(typeguard, 'typechecked', _unchecked):
        import parsl  # noqa: F401

    if hidden:
        del sys.modules['sqlalchemy']


def _unchecked(target: Any) -> Any:
    return target
