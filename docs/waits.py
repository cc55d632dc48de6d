"""Writes the table of waits of evidence/waits.md: ``python -m docs.waits``."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.chaos.waits import Wait, waits

PAGE = Path(__file__).parent / 'evidence' / 'waits.md'
BEGIN, END = '<!-- made by docs/waits.py -->', '<!-- end -->'


def _row(wait: Wait) -> str:
    setting = f' (`{wait.setting}`)' if wait.setting else ''
    return f'| {wait.waits_for} | {wait.limit_s:g} s{setting} | {wait.then} |'


def page(text: str) -> str:
    """The page with its table written anew."""
    before, _, rest = text.partition(BEGIN)
    parts = [
        f'| {who} waits for | at most | then |\n|---|---|---|\n' + '\n'.join(map(_row, rows))
        for who, rows in groupby(waits(), key=lambda wait: wait.who)
    ]
    return f'{before}{BEGIN}\n\n' + '\n\n'.join(parts) + f'\n\n{END}{rest.partition(END)[2]}'


if __name__ == '__main__':
    PAGE.write_text(page(PAGE.read_text()))
