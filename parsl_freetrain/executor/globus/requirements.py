"""Finds the modules that a function needs at run time, without running anything."""

from __future__ import annotations

import ast
import inspect
import pickletools
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from parsl_freetrain.executor.fragment.payload import OURS

_IMPORTS = 'cloudpickle.cloudpickle.subimport'
_TEXTS = ('SHORT_BINUNICODE', 'BINUNICODE', 'BINUNICODE8', 'UNICODE')


def modules_needed(function: Callable[..., Any], payload: bytes) -> tuple[str, ...]:
    """Top-level modules that nodes must have to run a function, except Python's own and ours.

    Parameters
    ----------
    function
        The user's function. Its own import statements count, except optional ones in a ``try``.
    payload
        The function with its arguments, from
        :func:`parsl_freetrain.executor.fragment.payload.pack`. What it refers to by name counts.
    """
    tops = {name.partition('.')[0] for name in (*_imported(function), *_referred_to(payload))}
    return tuple(sorted(tops - set(sys.stdlib_module_names) - {'', '__main__', OURS}))


def _imported(function: Callable[..., Any]) -> Iterator[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (
        OSError,
        TypeError,
        SyntaxError,
    ):  # typed at a prompt, built in, or a part of an expression
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ''
        tried = node.body if isinstance(node, ast.Try) and node.handlers else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in tried]


def _referred_to(payload: bytes) -> Iterator[str]:
    """Modules of the globals in a pickle, and those that cloudpickle imports by name.

    A global takes the last two texts from the stack, module and name; texts can come from the memo.
    """
    texts: list[str] = []
    memo: list[str | None] = []
    top: str | None = None  # top of the stack, if it is a text or the function that imports by name
    for opcode, argument, _ in pickletools.genops(payload):
        if opcode.name == 'MEMOIZE':
            memo.append(top)
            continue
        below, top = top, None
        if opcode.name in _TEXTS:
            top = str(argument)
        elif opcode.name in ('BINGET', 'LONG_BINGET'):
            top = memo[int(argument or 0)]
        if opcode.name == 'STACK_GLOBAL':
            module, name = texts[-2:]
            yield module
            top = _IMPORTS if f'{module}.{name}' == _IMPORTS else None
        elif top is not None and top != _IMPORTS:
            texts.append(top)
            if below == _IMPORTS:
                yield top
