"""What ``freetrain run`` and ``rehearse`` are given: a file, or a function main(config)."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from parsl_freetrain.core.model.errors import BadInput, of_user


def workflow_at(given: str, arguments: list[str]) -> Callable[[Any], Any]:
    """The function of the configuration: a file's or module's ``main``, or the file itself."""
    path = Path(given)
    if path.suffix == '.py' and path.is_file() and not has_main(path):
        return lambda config: _as_script(path, arguments, config)
    with of_user(f'The workflow {given} cannot be imported'):
        module = _file(path) if path.suffix == '.py' else _module(given)
    main = getattr(module, 'main', None)
    if not callable(main):
        raise BadInput(
            f'The workflow {given} has no function main(config), which is what is called of a '
            f'module; name its file, {module.__file__}, to run it as a script.'
        )
    every = inspect.signature(main).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    takes = [p for p in every if p.kind in (*kinds, inspect.Parameter.VAR_POSITIONAL)]
    if not takes or takes[0].name in ('argv', 'args', 'arguments'):
        raise BadInput(
            f'The function main of {given} does not take a Parsl configuration; it should be '
            'main(config), or run the workflow with python.'
        )
    if arguments and len(takes) < 2 and takes[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        raise BadInput(
            f'The workflow {given} takes no arguments of its own, and {" ".join(arguments)!r} was '
            'given; it should have main(config, arguments).'
        )
    return (lambda config: main(config, arguments)) if arguments else main


def has_main(path: Path) -> bool:
    """Whether a file defines or imports a ``main``; one that cannot be parsed says why when run."""
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.parse(path.read_bytes()).body:
            named = [node.name] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.ImportFrom):
                named = [name.asname or name.name for name in node.names]
            if 'main' in named:
                return True
    return False


def _as_script(path: Path, arguments: list[str], config: Any) -> int:
    """Run a file as ``python FILE ARGUMENTS`` does, with the configuration loaded."""
    import parsl
    from parsl.errors import ConfigurationError

    sys.argv = [str(path), *arguments]
    _on_the_path(path.absolute().parent)
    with parsl.load(config):
        try:
            runpy.run_path(str(path), run_name='__main__')
        except ConfigurationError as error:
            raise BadInput(
                f'The workflow {path} loads a Parsl configuration itself; run it with python, or '
                'leave parsl.load out.'
            ) from error
    return 0


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f'There is no workflow {path}; name a Python file, or a module.')
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None or name in sys.modules:
        raise BadInput(f'The workflow {path} cannot be imported as {name!r}; give it another name.')
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # serialisation finds its functions by name
    _on_the_path(path.absolute().parent)  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _on_the_path(folder: Path) -> None:
    """For this process and the workers of Parsl's executors, which import apps from there."""
    sys.path.insert(0, str(folder))
    paths = [str(folder), *filter(None, [os.environ.get('PYTHONPATH')])]
    os.environ['PYTHONPATH'] = os.pathsep.join(paths)


def _module(name: str) -> ModuleType:
    _on_the_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f'{error.name}.')):
            raise BadInput(
                f'There is no workflow {name}; name a Python file (with its .py), or a module.'
            ) from None
        raise
