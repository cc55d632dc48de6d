"""A quicker import of Parsl, for processes that only relay tasks or run them."""

from __future__ import annotations

import sys


def import_parsl() -> None:
    """Import Parsl without its monitoring database, which these processes do not use, and which
    takes half of the time where SQLAlchemy is installed.
    """
    hidden = 'sqlalchemy' not in sys.modules
    if hidden:
        sys.modules['sqlalchemy'] = None  # type: ignore[assignment]
    import parsl  # noqa: F401

    if hidden:
        del sys.modules['sqlalchemy']
