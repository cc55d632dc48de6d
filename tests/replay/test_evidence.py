"""The table of what replays show is true: rows of it, done again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / 'shared' / 'data'
TEXT = ROOT / 'docs' / 'evidence-replay.md'


def documented(options: str) -> float:
    """U in the row of the table with these options."""
    found = re.findall(rf'^\| `{re.escape(options)}` \| \**(\.\d+)', TEXT.read_text(), re.MULTILINE)
    assert len(found) == 1, f'{TEXT.name} has {len(found)} rows for {options}'
    return float(found[0])


@pytest.mark.parametrize('options', ['--max-trainers 10 --rescale-cost 5', '--max-trainers 10 --horizon 10'])
def test_a_row_of_the_table(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    idle, trainers = DATA / 'idle' / 'summit-2021-02-week1.csv.gz', DATA / 'trainers' / 'hpo-shufflenet-1000.json.gz'
    if not idle.exists():
        pytest.skip('needs the public Summit trace, which is not part of the repository')
    assert main(['replay', '--idle', str(idle), '--from', '72743', '--trainers', str(trainers), '--json', '--nodes', '1024',
                 *options.split()]) == 0
    assert round(json.loads(capsys.readouterr().out)['efficiency'], 3) == documented(options)


def test_every_row_says_its_options() -> None:
    rows = [line for line in TEXT.read_text().splitlines() if re.match(r'\| .*\| \**\.\d', line)]
    assert len(rows) > 20
    assert all(re.search(r'`--[a-z]', line) for line in rows)
