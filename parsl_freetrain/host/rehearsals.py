"""Which functions were rehearsed, as they are written now: empty files in the user's cache."""

import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parsl_freetrain.host.files import make_dir

log = logging.getLogger(__name__)
_said: set[str] = set()


def note(function: Callable[..., Any]) -> None:
    try:
        make_dir(_mark(function).parent)
        _mark(function).touch(mode=0o600)
    except (OSError, RuntimeError) as error:
        log.info('It is not remembered that a function was rehearsed: %s', error)


def say_if_never(function: Callable[..., Any]) -> None:
    """Say once, in one line, that a function was never rehearsed."""
    name = function.__name__
    if not (name in _said or was_rehearsed(function)):
        said = f'{name} was never rehearsed: {name}.rehearse(...) finds what a cut would change.'
        log.info(said)
        if sys.stderr is not None and sys.stderr.isatty():  # it may be closed
            print(said, file=sys.stderr)
    _said.add(name)


def was_rehearsed(function: Callable[..., Any]) -> bool:
    try:
        return _mark(function).exists()
    except (OSError, RuntimeError):  # there is no home
        return True


def _mark(function: Callable[..., Any]) -> Path:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = ''
    called = f'{function.__qualname__}\n{source}'
    cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
    return cache / 'freetrain' / 'rehearsed' / hashlib.sha256(called.encode()).hexdigest()[:32]
