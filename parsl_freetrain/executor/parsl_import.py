"""A quicker import of Parsl, for processes that only relay tasks or run them."""

import sys
from types import ModuleType
from typing import Any


def import_parsl(*, runs_apps: bool) -> None:
    """Import Parsl without its monitoring database (SQLAlchemy: half of the time), and, where no
    apps run, without requests and the code that checks types of arguments (generated anew at every
    import: more than half of the rest). Bash apps rely on it: it refuses what is no file for their
    output.
    """
    hidden: dict[str, Any] = {'sqlalchemy': None}
    if not runs_apps:
        unchecked: Any = ModuleType('typeguard')
        unchecked.typechecked = lambda target: target
        hidden |= {'typeguard': unchecked, 'requests': ModuleType('requests')}
    hidden = {name: instead for name, instead in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    import parsl  # noqa: F401

    for name in hidden:
        del sys.modules[name]
