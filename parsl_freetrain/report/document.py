"""Pieces of HTML in which everything that comes from outside is escaped, and the page around them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

HERE = 'parsl_freetrain.report'


def resource(name: str) -> str:
    """A file of this package."""
    return (files(HERE) / name).read_text(encoding='utf-8')


def source_of(text: str) -> str:
    """What a Content-Security-Policy calls a style sheet or a script that stands in the page itself."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page(title: str, body: str) -> str:
    """A whole page that loads nothing, runs nothing and sends nothing.

    Parameters
    ----------
    title
        As text.
    body
        As HTML.
    """
    style = resource('style.css')
    policy = f"default-src 'none'; style-src {source_of(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    return Template(resource('page.html')).substitute(policy=policy, title=escape(title), style=style, body=body)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (0,), long: Sequence[int] = ()) -> str:
    """A table of texts; the columns ``text`` and ``long`` are aligned left, and ``long`` ones may be broken into lines."""
    def cell(tag: str, i: int, value: str) -> str:
        kind = ' class="long"' if i in long and tag == 'td' else ' class="text"' if i in (*text, *long) else ''
        return f'<{tag}{kind}>{escape(value)}</{tag}>'

    lines = ''.join(f'<tr>{"".join(cell("td", i, value) for i, value in enumerate(row))}</tr>' for row in rows)
    return (f'<div class="wide"><table><thead><tr>{"".join(cell("th", i, name) for i, name in enumerate(head))}</tr></thead>'
            f'<tbody>{lines}</tbody></table></div>')


def tiles(values: Mapping[str, str]) -> str:
    """Names with a value each, the value large."""
    shown = ''.join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in values.items())
    return f'<div class="tiles">{shown}</div>'


def legend(kinds: Mapping[str, str], where: str = '') -> str:
    """By name, a class of the style sheet; ``where`` is a class of the whole."""
    return f'<ul class="legend {where}">' + ''.join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="area {kind}" width="10" height="10"/></svg>{escape(name)}</li>'
        for name, kind in kinds.items()) + '</ul>'


def paragraph(text: str, kind: str = '') -> str:
    """One paragraph of text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f'<p>{escape(text)}</p>'


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f'<h{level}>{escape(text)}</h{level}>'


def clipped(text: str, most: int = 400) -> str:
    """The text without control characters, in so many characters at most."""
    plain = ''.join(c if c.isprintable() else ' ' for c in text)
    return plain if len(plain) <= most else plain[: most - 1] + '…'
