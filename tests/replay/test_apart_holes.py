"""The replay of docs/apart_holes.py."""

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.long
def test_more_pieces_train_where_fewer_nodes_can_talk(tmp_path: Path) -> None:
    trace = tmp_path / 'trace.csv.gz'
    rows = [f'{100 * n},{1500 + 300 * n},n{n}' for n in range(8)]
    trace.write_bytes(gzip.compress('\n'.join(['start_s,end_s,node', *rows]).encode()))
    words = [str(trace), '--nodes', '8', '--days', '0.03', '--from', '0']
    script = ROOT / 'docs' / 'apart_holes.py'
    said = subprocess.check_output([sys.executable, str(script), *words], text=True, cwd=ROOT)
    table = [list(map(float, line.split('|')[2:-1])) for line in said.splitlines()[1:]]
    alone, pairs, _, together = table
    assert alone[1] > pairs[0] > alone[0] > 0 and together[0] > pairs[0]
