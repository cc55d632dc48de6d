"""Python imports this module when it starts, if this folder is on PYTHONPATH. The sitecustomize
that it hides is imported next.
"""

from __future__ import annotations

import os.path
import sys
from importlib.machinery import PathFinder
from types import ModuleType


def _go_on() -> None:
    """Run the sitecustomize that this one hides, if there is any."""
    here = os.path.dirname(os.path.realpath(__file__))
    spec = PathFinder.find_spec(
        'sitecustomize', [entry for entry in sys.path if os.path.realpath(entry) != here]
    )
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(ModuleType('sitecustomize'))


try:
    from parsl_freetrain.executor.globus.registration import register
except ImportError:  # Pythons without the package may inherit the variable
    pass
else:
    register()
_go_on()
