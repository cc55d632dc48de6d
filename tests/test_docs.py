"""The documentation's two scripts run and differ as it says. Its blocks of code are run by
tests/docs; ``make docs`` builds it, and every warning is an error.
"""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / 'docs' / 'examples'


def changes(plain: str, changed: str) -> list[tuple[list[int], list[int]]]:
    """Numbers of lines that were replaced by which; blank lines, and those that only moved to the
    left, are not counted.
    """
    one, other = (
        [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for text in (plain, changed)
    )
    codes = difflib.SequenceMatcher(
        None, [line for _, line in one], [line for _, line in other], autojunk=False
    ).get_opcodes()
    return [
        ([n for n, _ in one[i1:i2]], [n for n, _ in other[j1:j2]])
        for kind, i1, i2, j1, j2 in codes
        if kind != 'equal'
    ]


def changed_lines(plain: str, changed: str) -> int:
    """Lines added, removed or replaced."""
    return sum(max(len(gone), len(new)) for gone, new in changes(plain, changed))


@pytest.mark.parametrize('script', ['digits', 'transformers', 'lightning', 'images'])
def test_at_most_ten_lines_change(script: str) -> None:
    plain, freetrain = (
        (EXAMPLES / f'{script}_{kind}.py').read_text() for kind in ('plain', 'freetrain')
    )
    assert 5 < changed_lines(plain, freetrain) <= 10


@pytest.mark.parametrize(
    ('page', 'scripts'),
    [('app.md', ['digits']), ('your-script.md', ['transformers', 'lightning', 'images'])],
)
def test_lines_marked_as_different_are_those(page: str, scripts: list[str]) -> None:
    wanted = []
    for script in scripts:
        plain, freetrain = (
            (EXAMPLES / f'{script}_{kind}.py').read_text() for kind in ('plain', 'freetrain')
        )
        gone, new = zip(*changes(plain, freetrain), strict=True)
        wanted += [','.join(str(n) for part in side for n in part) for side in (gone, new)]
    marked = re.findall(r':emphasize-lines: ([\d,]+)', (ROOT / 'docs' / page).read_text())
    assert marked == wanted


def test_counting_changed_lines() -> None:
    assert changed_lines('a\n  b\n', 'a\nb\n\n') == 0
    assert changed_lines('a\nb\nc\n', 'a\nx\ny\nc\nd\n') == 3
    assert changed_lines('a\nb\n', 'b\n') == 1


@pytest.mark.parametrize(
    'script', ['digits_plain.py', pytest.param('digits_freetrain.py', marks=pytest.mark.long)]
)
def test_both_scripts_run(script: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / script), run_name='__main__')
    found = re.search(r"loss(?: of the last batch)?'?: ([\d.e-]+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) < 0.5


def test_every_room_is_named() -> None:
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    rooms = {
        folder.name
        for folder in (ROOT / 'parsl_freetrain').iterdir()
        if (folder / '__init__.py').is_file()
    } | {'training/parallel'}
    assert not {room for room in rooms if f'`{room}/`' not in text}
