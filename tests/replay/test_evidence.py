"""Rows of the table of what replays show, done again; ``make evidence`` does all."""

import re
from pathlib import Path

import pytest

from tests.replay.evidence import DATA, PAGE, done_again, rows


@pytest.mark.long
def test_a_row_of_the_table(tmp_path: Path) -> None:
    if not DATA.exists():
        pytest.skip('needs the public Summit trace, which is not part of the repository')
    options = '--max-trainers 10 --rescale-cost 5'
    (row,) = [row for row in rows(PAGE.read_text()) if row.options == options]
    assert round(float(str(done_again(row, tmp_path)['efficiency'])), 3) == row.efficiency


def test_every_row_says_its_options() -> None:
    """In the sections of what ``make evidence`` does again."""
    page = PAGE.read_text()
    found = rows(page)
    assert len(found) > 40
    sections = {section.partition('\n')[0]: section for section in page.split('\n## ')}
    shown = '\n'.join(sections[name] for name in {row.section for row in found})
    assert len(found) == len(re.findall(r'^\| .*\| \**\d?\.\d', shown, re.MULTILINE))
