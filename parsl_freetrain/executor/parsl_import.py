"""A quicker import of Parsl, for processes that only relay tasks or run them."""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import typeguard


def import_parsl(*, runs_apps: bool) -> None:
    """Import Parsl without what these processes do not use: its monitoring database, which takes
    half of the time where SQLAlchemy is installed; and, where no apps run, the code that checks the
    types of arguments, which is generated anew at every import and takes half of the rest. Bash
    apps rely on it: it refuses what is no file for their output.
    """
    hidden = 'sqlalchemy' not in sys.modules
    if hidden:
        sys.modules['sqlalchemy'] = None  # type: ignore[assignment]
    unchecked = mock.patch.object(typeguard, 'typechecked', _unchecked)
    with contextlib.nullcontext() if runs_apps else unchecked:
        import parsl  # noqa: F401

    if hidden:
        del sys.modules['sqlalchemy']


def _unchecked(target: Any) -> Any:
    return target
