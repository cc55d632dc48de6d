"""Pages on a code host (CommonMark): links, pictures and copies are good, nothing of Sphinx; those
made from the code are as it is, and a promise is the same on all pages.
"""

import re
import runpy
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.chaos.fault_kinds import KINDS
from tests.support.pages import ROOT, name_of, pages

copies = runpy.run_path(str(ROOT / 'docs' / 'copies.py'))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r'^```.*?^```[ ]*$', '', page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names of the page's headings, as GitHub and MyST make them."""
    found = re.findall(r'^#+ (.*)$', prose(page), flags=re.M)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in found}


@pytest.mark.parametrize('page', [ROOT / 'CHANGELOG.md', *pages()], ids=name_of)
def test_links_have_texts_and_lead_somewhere(page: Path) -> None:
    html = MarkdownIt('commonmark').enable('table').render(page.read_text())
    shown = re.sub(r'<(code|pre)>.*?</\1>', 'code', html, flags=re.S)
    assert not re.search(r'<a [^>]*></a>', shown)
    # Roles, fences with a name in braces, and definition lists.
    assert not re.search(r'\{[a-z:]+\}|:::|^(<p>)?: |^:\w+:', shown, flags=re.M)
    assert not re.search(r'class="language-\{', html)
    for target in re.findall(r'(?:href|src)="([^"]+)"', html):
        if re.match(r'https?:|mailto:', target):
            continue
        path, _, anchor = target.partition('#')
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor and file.suffix == '.md':
            assert anchor in anchors(file), target


@pytest.mark.parametrize('page', pages(), ids=name_of)
def test_copies_are_those_of_the_files(page: Path) -> None:
    """If not: ``python docs/copies.py``."""
    text = page.read_text()
    assert copies['page'](text) == text


DOCS = Path(__file__).resolve().parents[2] / 'docs'


def test_the_options_are_those_of_help() -> None:
    """If not: ``python docs/command_line.py``."""
    written = runpy.run_path(str(DOCS / 'command_line.py'))
    text = (DOCS / 'command-line.md').read_text()
    assert written['page'](text) == text


def test_the_waits_are_those_of_the_code() -> None:
    """If not: ``python -m docs.waits``."""
    text = (DOCS / 'evidence' / 'waits.md').read_text()
    assert runpy.run_path(str(DOCS / 'waits.py'))['page'](text) == text


@pytest.mark.long
def test_pictures_can_be_drawn_anew(tmp_path: Path) -> None:
    """Those of docs/pictures.py, from what was measured."""
    main = runpy.run_path(str(DOCS / 'pictures.py'))['main']
    main.__globals__['STATIC'] = tmp_path
    main()
    drawn = {picture.name for picture in tmp_path.iterdir()}
    assert len(drawn) == 9 and all((DOCS / '_static' / name).is_file() for name in drawn)


def test_the_kinds_of_faults_are_counted() -> None:
    text = (DOCS / 'evidence' / 'chaos.md').read_text()
    assert f'of {len(KINDS)} kinds' in text


PAGES = 'README.md', 'docs/guides/administrators.md'


def test_the_promise_is_the_same_on_all_pages() -> None:
    said = set()
    for page in PAGES:
        text = Path(page).read_text()
        begin = text.index("With the scheduler's preemption (`mode='preemptible'`)")
        said.add(text[begin : text.index('[Measured](', begin)])
    assert len(said) == 1
