"""The pages read on a code host, which renders CommonMark: links have texts and lead somewhere, and
nothing is left that only Sphinx understands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, name_of, pages


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r'^```.*?^```[ ]*$', '', page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names of the page's headings, as GitHub and MyST make them."""
    found = re.findall(r'^#+ (.*)$', prose(page), flags=re.M)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in found}


@pytest.mark.parametrize('page', pages(), ids=name_of)
def test_links_have_texts_and_lead_somewhere(page: Path) -> None:
    text = prose(page)
    assert not re.findall(r'\[\]\([^)]*\)', text)
    assert not re.findall(r'\{[a-z:]+\}`', text)
    for target in re.findall(r'\]\(([^)\s]+)\)', text):
        if re.match(r'https?:|mailto:', target):
            continue
        path, _, anchor = target.partition('#')
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor and file.suffix == '.md':
            assert anchor in anchors(file), target


def test_pages_are_found() -> None:
    assert ROOT / 'docs' / 'evidence' / 'index.md' in pages()
