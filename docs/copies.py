"""Writes copies of files into the pages that show them, so that the pages read on a code host::

python docs/copies.py

A page has a comment with the file's path, before a fenced block; with two paths, the block shows
how the second file differs from the first. docs/reference.md gets the public names with the first
sentences of their docstrings.
"""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path

import parsl_freetrain

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r'^<!-- (?P<paths>[\w/. -]+\.py) -->\n```\w+\n.*?^```$', re.M | re.S)


def shown(found: re.Match[str]) -> str:
    texts = [(ROOT / path).read_text() for path in found['paths'].split()]
    language, text = ('python', texts[0]) if len(texts) == 1 else ('diff', difference(*texts))
    return f'<!-- {found["paths"]} -->\n```{language}\n{text.rstrip()}\n```'


def difference(plain: str, changed: str) -> str:
    """All lines of both, as ``diff`` marks them."""
    one, other = plain.splitlines(), changed.splitlines()
    lines = list(difflib.unified_diff(one, other, n=len(one), lineterm=''))[3:]
    return '\n'.join(line.rstrip() for line in lines)


def names() -> str:
    rows = []
    for name in sorted(parsl_freetrain.__all__, key=str.lower):
        text = ' '.join((inspect.getdoc(getattr(parsl_freetrain, name)) or '').split())
        plain = re.sub(r':\w+:`~?(?:[\w.]+\.)?(\w+)`', r'`\1`', text.replace('``', '`'))
        rows.append(f'| `{name}` | {re.split(r"(?<=[.;:])(?= |$)", plain)[0].rstrip(".;:")} |')
    return '\n'.join(['| name | what it is |', '|---|---|', *rows])


def page(text: str) -> str:
    """The page with its copies written anew."""
    text = re.sub(r'(?s)(?<=<!-- names -->\n).*(?=<!-- end -->)', lambda _: names() + '\n', text)
    return BLOCK.sub(shown, text)


if __name__ == '__main__':
    for file in (ROOT / 'docs').rglob('*.md'):
        if (text := file.read_text()) != (new := page(text)):
            file.write_text(new)
