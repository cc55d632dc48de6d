"""A quicker import of Parsl, for processes that only relay tasks or run them."""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

import typeguard


def import_parsl(*, runs_apps: bool) -> None:
    """Import Parsl without its monitoring database (SQLAlchemy: half of the time), and, where no
    apps run, without the code that checks types of arguments (generated anew at every import: half
    of the rest). Bash apps rely on it: it refuses what is no file for their output.
    """
    hidden = 'sqlalchemy' not in sys.modules
    if hidden:
        sys.modules['sqlalchemy'] = None  # type: ignore[assignment]
    unchecked = mock.patch.object(typeguard, 'typechecked', lambda target: target)
    with contextlib.nullcontext() if runs_apps else unchecked:
        import parsl  # noqa: F401

    if hidden:
        del sys.modules['sqlalchemy']
