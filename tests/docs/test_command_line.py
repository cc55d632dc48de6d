"""The page on the command line has the options that ``--help`` has."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / 'docs'


def test_the_options_are_those_of_help() -> None:
    """If not: ``python docs/command_line.py``."""
    written = runpy.run_path(str(DOCS / 'command_line.py'))
    text = (DOCS / 'command-line.md').read_text()
    assert written['page'](text) == text
