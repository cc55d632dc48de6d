"""Writes the options of all verbs into docs/command-line.md, as ``--help`` has them::

python docs/command_line.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.main import VERBS, command_of

PAGE = Path(__file__).with_name('command-line.md')
COMMON = {
    '--ledger PATH': "The run's ledger, or the folder that it is in. Default: that of this folder "
    'or its checkpoints/, or of the nearest folder above that has one.',
    '--run NAME': 'A run of the ledger, by the beginning of its name. Default: the newest.',
    '--timeout S': "Maximum seconds to wait for the run's answer; default: `30`.",
    '--json': 'One JSON document on standard output.',
}
"""Options of several verbs, with what ``--help`` says of them."""
BEGIN = '<!-- from here on written by docs/command_line.py -->'


def section(verb: str) -> str:
    """A verb: its usage, what it does, and a table of its arguments and options."""
    command = command_of(verb)
    arguments = [_shown(each) for each in command.params if _is_argument(each)]
    what = inspect.cleandoc(command.help or VERBS[verb])
    said = {_shown(each): _said(each) for each in command.params if each.help}
    rows = [f'| `{name}` | {text} |' for name, text in said.items() if COMMON.get(name) != text]
    common = ', '.join(
        f'`{name.split()[0]}`' for name, text in said.items() if COMMON.get(name) == text
    )
    table = '\n'.join(['| | |', '|---|---|', *rows]) if rows else ''
    usage = ' '.join(['freetrain', verb, *arguments]).replace('\\', '')
    more = f'And {common}.' if common else ''
    parts = f'### freetrain {verb}', f'`{usage}`', what, table, more
    return '\n\n'.join(filter(None, parts))


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
    rows = [f'| `{name}` | {text} |' for name, text in COMMON.items()]
    common = '\n'.join(['Of several verbs:', '', '| | |', '|---|---|', *rows])
    parts = f'{kept}{BEGIN}', '## All options', common, *map(section, VERBS)
    return '\n\n'.join(parts) + '\n'


if __name__ == '__main__':
    PAGE.write_text(page(PAGE.read_text()))
