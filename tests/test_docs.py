"""The documentation's two scripts run and differ as it says; tests/docs runs its blocks."""

import difflib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / 'docs' / 'examples'


def changed_lines(plain: str, changed: str) -> int:
    """Lines added, removed or replaced; no blank ones, nor those that only moved to the left."""
    one, other = (
        [line.strip() for line in text.splitlines() if line.strip()] for text in (plain, changed)
    )
    codes = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in codes if kind != 'equal')


@pytest.mark.parametrize('script', ['digits', 'transformers', 'lightning', 'images'])
def test_at_most_ten_lines_change(script: str) -> None:
    plain, freetrain = ((EXAMPLES / f'{script}_{k}.py').read_text() for k in ('plain', 'freetrain'))
    assert 5 < changed_lines(plain, freetrain) <= 10


@pytest.mark.long
@pytest.mark.parametrize('script', ['digits_plain.py', 'digits_freetrain.py'])
def test_both_scripts_run(script: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / script).read_text()
    assert text.count('20') == 1, 'epochs, of which a few are enough'
    (run_dir / script).write_text(text.replace('20', '6'))
    runpy.run_path(str(run_dir / script), run_name='__main__')
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
