"""JSON as PBS writes it, which is not always JSON: qstat copies environment variables, comments and
arguments with little care for line ends, quotes, backslashes and numbers such as 007. All else
keeps to one ``"name":value`` on each line.
"""

import json
import re
from typing import Any

from parsl_freetrain.sites.batch.records import NotUnderstood, after_banner

_PAIR = re.compile(r'^(\s*"(?:[^"\\]|\\.)*":\s*)(.*?)(,?)$', re.DOTALL)
_NEW = re.compile(r'^\s*("(?:[^"\\]|\\.)*":|[\]{}],?\s*$|"(?:[^"\\]|\\.)*",?\s*$)')
_VARIABLES = re.compile(r'^( *)"Variable_List":\s*\{$.*?^\1\},?$\n?', re.MULTILINE | re.DOTALL)


def document(answer: str, command: str, joined: bool = False) -> dict[str, Any]:
    """The document in an answer, mended, or NotUnderstood. Of two values under one name the first
    counts, and of objects none: another user's value that was not escaped may have written one.
    ``joined``: users write none, and texts of one name are parts of one (limits of a queue).
    """
    answer = after_banner(answer, command, r'\{', None)
    bare = re.sub(r',(\s*\})', r'\1', _VARIABLES.sub('', answer))
    for text in (answer, bare, _mended(bare)):
        try:
            found: dict[str, Any]
            found = json.loads(
                text, strict=False, object_pairs_hook=_joined if joined else _unambiguous
            )
        except (ValueError, RecursionError) as error:
            problem: Exception = error
        else:
            return found
    raise NotUnderstood(f'{command} did not answer with a JSON document: {problem}')


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and isinstance(value, dict):
            found[name] = None
        found.setdefault(name, value)
    return found


def _joined(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        found[name] = f'{found[name]},{value}' if name in found else value
    return found


def _mended(text: str) -> str:
    """Every value that is no JSON as a text; lines that begin no pair belong to the one before."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and not _NEW.match(line):
            lines[-1] += '\n' + line
        else:
            lines.append(line)
    return '\n'.join(_mended_pair(line) for line in lines)


def _mended_pair(line: str) -> str:
    found = _PAIR.match(line)
    if found is None or found[2] in ('{', '[') or not (found[2] or found[3]):
        return line
    name, value, comma = found.groups()
    try:
        json.loads(value, strict=False)
    except ValueError:
        quoted = len(value) > 1 and value.startswith('"') and value.endswith('"')
        value = json.dumps(value[1:-1] if quoted else value)
    return name + value + comma
