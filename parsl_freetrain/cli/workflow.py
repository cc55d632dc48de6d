"""A workflow that ``freetrain run`` can run: a Python file or module with a function ``main(config)``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from parsl_freetrain.core.errors import BadInput


def workflow_at(given: str, arguments: list[str]) -> Callable[[Any], Any]:
    """What is to be called with the Parsl configuration.

    Parameters
    ----------
    given
        A Python file, or the name of a module that can be imported from here.
    arguments
        What the command line has for the workflow itself; its ``main`` takes them as second argument.

    Raises
    ------
    BadInput
        There is no such file or module, it cannot be imported, or it has no such ``main``.
    """
    path = Path(given)
    try:
        module = _file(path) if path.suffix == '.py' else _module(given)
    except BadInput:
        raise
    except Exception as error:   # the user's own code
        raise BadInput(f'The workflow {given} cannot be imported: {type(error).__name__}: {error}.') from error
    main = getattr(module, 'main', None)
    if not callable(main):
        raise BadInput(f'The workflow {given} has no function main(config); write one that loads it with Parsl, or run it with python.')
    takes = [p for p in inspect.signature(main).parameters.values()
             if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not takes or takes[0].name in ('argv', 'args', 'arguments'):
        raise BadInput(f'The function main of {given} does not take a Parsl configuration; it should be main(config), '
                       f'or run the workflow with python.')
    if arguments and len(takes) < 2 and takes[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        raise BadInput(f'The workflow {given} takes no arguments of its own, and {" ".join(arguments)!r} was given; '
                       f'it should have main(config, arguments).')
    return (lambda config: main(config, arguments)) if arguments else main


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f'There is no workflow {path}; name a Python file, or a module.')
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None or name in sys.modules:
        raise BadInput(f'The workflow {path} cannot be imported as {name!r}; give it another name.')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module          # its functions are found by name where they are serialised
    sys.path.insert(0, str(path.absolute().parent))   # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f'{error.name}.')):
            raise BadInput(f'There is no workflow {name}; name a Python file (with its .py), or a module.') from None
        raise
