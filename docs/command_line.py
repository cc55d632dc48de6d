"""Writes the options of all verbs into docs/command-line.md, as ``--help`` has them::

python docs/command_line.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.main import VERBS, command_of

PAGE = Path(__file__).with_name('command-line.md')
BEGIN = '<!-- from here on written by docs/command_line.py -->'


def section(verb: str) -> str:
    """A verb: its usage, what it does, and a table of its arguments and options."""
    command = command_of(verb)
    arguments = [_shown(each) for each in command.params if _is_argument(each)]
    what = inspect.cleandoc(command.help or VERBS[verb])
    rows = [f'| `{_shown(each)}` | {_said(each)} |' for each in command.params if each.help]
    table = '\n'.join(['| | |', '|---|---|', *rows])
    usage = ' '.join(['freetrain', verb, *arguments]).replace('\\', '')
    return f'### freetrain {verb}\n\n`{usage}`\n\n{what}\n\n{table}'


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == 'argument')


def _shown(param: Any) -> str:
    """As on the command line, within a table."""
    takes = (param.metavar or param.name.upper()).replace('|', '\\|')
    if _is_argument(param):
        return takes if param.required else f'[{takes}]'
    names = ', '.join([*param.opts, *param.secondary_opts])
    return names if param.is_flag else f'{names} {takes}'


def _said(param: Any) -> str:
    text = ' '.join(param.help.split()).replace('|', '\\|')
    told = getattr(param.default, 'value', param.default)
    if _is_argument(param) or param.is_flag or told in (None, '', ()) or 'efault' in text:
        return text
    return (
        f'{text.removesuffix(".")}; default: `{told:g}`.'
        if isinstance(told, float)
        else (f'{text.removesuffix(".")}; default: `{told}`.')
    )


def page(text: str) -> str:
    """The page with its end written anew."""
    kept = text.partition(BEGIN)[0]
    return f'{kept}{BEGIN}\n\n## All options\n\n' + '\n\n'.join(map(section, VERBS)) + '\n'


if __name__ == '__main__':
    PAGE.write_text(page(PAGE.read_text()))
