"""Sphinx configuration; build with ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parsl_freetrain import __version__

project = 'parsl-freetrain'
author = 'the parsl-freetrain contributors'
copyright = author
version = release = __version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx.ext.viewcode']
myst_heading_anchors = 3
exclude_patterns = ['_build', 'examples']

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_default_options = {'members': True, 'show-inheritance': True}
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# A name in a list of attributes is no reference; many classes have an attribute of that name.
suppress_warnings = ['ref.python']

html_theme = 'furo'
html_title = f'parsl-freetrain {release}'
html_static_path = ['_static']
html_css_files = ['code.css']
html_show_sourcelink = False


def append_contents(app: Any, page: str, source: list[str]) -> None:
    """The start page has the table of contents here alone, since only Sphinx understands it."""
    if page == 'index':
        source[0] += (Path(__file__).with_name('contents.txt')).read_text()


logger = logging.getLogger(__name__)
LIMITED = re.compile(
    r"~?(?:typing\.)?Annotated\[(\w+), ~?(?:msgspec\.)?Meta\((?:[^'()]|'(?:[^'\\]|\\.)*')*\)\]"
)


def without_limits(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """Types without the limits that are checked when they are used: those stand in the text."""
    return signature and LIMITED.sub(r'\1', signature), returns


def attributes_without_limits(app: Any, page: Any) -> None:
    """The same of attributes, whose types are no signatures."""
    for shown in page.findall(addnodes.desc_annotation):
        if 'Meta(' in shown.astext():
            for short in list(shown.findall(addnodes.pending_xref_condition)):
                if short['condition'] == 'resolved':
                    short.parent.remove(short)
            shown.children = [nodes.Text(LIMITED.sub(r'\1', shown.astext()))]
    if 'Meta(' in page.astext():
        logger.warning('A type shows its limits: LIMITED in docs/conf.py does not know this form.')


def whole_sentence(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Napoleon takes what an attribute's first line has before a colon for its type."""
    if what in ('attribute', 'property') and lines:
        lines[0] = f': {lines[0]}'


def setup(app: Any) -> None:
    app.connect('source-read', append_contents)
    app.connect('autodoc-process-signature', without_limits)
    app.connect('autodoc-process-docstring', whole_sentence, priority=499)
    app.connect('doctree-read', attributes_without_limits)
