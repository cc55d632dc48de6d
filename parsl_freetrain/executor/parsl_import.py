"""A quicker import of Parsl, for processes that only relay tasks or run them."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

_PACKAGES = 'parsl', 'parsl.executors', 'parsl.executors.high_throughput', 'parsl.monitoring'


def import_parsl(*modules: str, runs_apps: bool) -> None:
    """Import modules of Parsl without its monitoring database (SQLAlchemy: half of the time).

    Where no apps run, also without what the packages around these modules import themselves (all
    executors and providers), without requests, and without the code that checks types of arguments
    (generated anew at every import). Apps may use all of Parsl; bash apps rely on these checks.
    """
    hidden: dict[str, Any] = {'sqlalchemy': None}
    if not runs_apps:
        unchecked: Any = ModuleType('typeguard')
        unchecked.typechecked = lambda target: target
        hidden |= {'typeguard': unchecked, 'requests': ModuleType('requests')}
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
    hidden = {name: instead for name, instead in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)
    for name in modules:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]
