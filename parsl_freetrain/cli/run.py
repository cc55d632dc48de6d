"""``freetrain run``: runs a workflow on a site."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console

from parsl_freetrain.cli.live.view import ClosingTable
from parsl_freetrain.cli.where import JsonOption, print_json, value
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, of_user
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary


def run(
    workflow: Annotated[
        str,
        typer.Argument(
            help='A Python file that calls trainings, or a file or module with a main(config).'
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The workflow's own arguments, after --.")
    ] = None,
    site: Annotated[
        str, value('NAME|FILE', 'local, a name in site_configs/, or a .py or .toml file.')
    ] = 'local',
    as_json: JsonOption = False,
) -> int:
    """Run a workflow on a site, with a Parsl configuration for it.

    A Python file is run as python runs it, with the configuration loaded, so it needs no more than
    decorated functions and their calls. If it has a function main(config), this is called instead,
    and loads the configuration itself by parsl.load(config). With --json the workflow's own output
    goes to standard error, and the closing summary to standard output.
    """
    from parsl_freetrain.cli.sites import config_of

    main = workflow_at(workflow, arguments or [])
    config, executor = config_of(site)
    ledger = executor.ledger_path
    print(
        f'The ledger is {ledger}; elsewhere, freetrain watch --ledger {ledger} shows what goes on.',
        file=sys.stderr,
    )
    before = None
    with contextlib.suppress(BadInput):  # the run replaces a ledger that cannot be read
        before = _newest(ledger)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        status = _called(main, config, workflow)
    if (run := _newest(ledger)) != before and run is not None:
        _close(ledger, run, as_json)
    return status


def _newest(ledger: Path) -> str | None:
    runs = Journal(ledger, keep_progress=False).history().runs if ledger.is_file() else []
    return runs[-1].name if runs else None


def _called(main: Any, config: Any, workflow: str) -> int:
    try:
        result = main(config)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        said = 'Stopped. Nothing is lost: the same command goes on from the checkpoints.'
        print(f'freetrain: {said}', file=sys.stderr)
        # One more Ctrl-C ends the process at once, and not with a traceback of what it clears up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BadInput:
        raise
    except FreeTrainError as error:
        print(f'freetrain: {error}', file=sys.stderr)
        return 1
    except Exception as error:  # the user's own code: show its traceback
        traceback.print_exc()
        how = type(error).__name__
        print(f'freetrain: The workflow {workflow} ended with {how}.', file=sys.stderr)
        return 1
    return int(bool(result)) if isinstance(result, int) else 0


def _close(ledger: Path, run: str, as_json: bool) -> None:
    found = summary(Journal(ledger, keep_progress=False).history(run))
    if as_json:
        print_json({'ledger': str(ledger), 'run': run, **found})
    else:
        Console().print(ClosingTable(found))


def workflow_at(given: str, arguments: list[str]) -> Callable[[Any], Any]:
    """The function of the configuration: a file's or module's ``main``, or the file itself."""
    path = Path(given)
    if path.suffix == '.py' and path.is_file() and not _has_main(path):
        return lambda config: _as_script(path, arguments, config)
    with of_user(f'The workflow {given} cannot be imported'):
        module = _file(path) if path.suffix == '.py' else _module(given)
    main = getattr(module, 'main', None)
    if not callable(main):
        raise BadInput(
            f'The workflow {given} has no function main(config); write one that loads it '
            'with Parsl, or run it with python.'
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


def _has_main(path: Path) -> bool:
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
