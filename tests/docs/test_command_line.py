"""Pages that are made from the code are as it is."""

import runpy
from pathlib import Path

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
