"""Scripts and commands of packages that make their trainers themselves."""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


def run_file(script: str, arguments: tuple[str, ...], made: Mapping[Any, Any]) -> None:
    """Run a file, or a command beside Python, as ``__main__``. ``made``: classes, and what makes
    their objects meanwhile, whoever has imported them. Raises BadInput if there is no such file, or
    it ends with a status.
    """
    path = Path(script) if Path(script).is_file() else Path(sys.executable).parent / script
    if not path.is_file():
        raise BadInput(
            f'run_script was given {script!r}, which is neither a file nor a command that an '
            'installed package has put beside Python.'
        )
    os.environ.setdefault('HYDRA_FULL_ERROR', '1')  # else it hides what ends a fragment
    for kind, make in made.items():
        make.__wrapped__ = object.__new__  # LightningCLI looks for the arguments of a class
        kind.__new__ = make
    try:
        _run(str(path), arguments)
    except SystemExit as ended:
        if ended.code:
            raise BadInput(f'{script} has ended with {ended.code}; see the log above.') from ended
    finally:
        for kind in made:
            kind.__new__ = lambda cls, *_, **__: object.__new__(cls)


def take_launches(launch: Any) -> None:
    """Have ``accelerate launch`` run its script here, since the ranks are there already."""

    def begin(*given: Any) -> None:
        _run(given[-1].training_script, given[-1].training_script_args)

    for name in vars(launch):
        if name.endswith('_launcher'):
            setattr(launch, name, begin)


def _run(path: str, arguments: Any) -> None:
    before, sys.argv = sys.argv, [path, *arguments]
    try:
        runpy.run_path(path, run_name='__main__')
    finally:
        sys.argv = before
