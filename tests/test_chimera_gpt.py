"""The workflow ``workflows/chimera_gpt.py`` in small: a pipeline that loses its nodes, and changes
its number of stages.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from workflows import chimera_gpt


@pytest.mark.long
def test_it_learns_through_kills_and_in_other_shapes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chimera_gpt.main(['--small', '--out', str(run_dir / 'out')]) == 0
    told = json.loads((run_dir / 'out' / 'summary.json').read_text())
    divided = told['divided']
    assert divided['preempted'] >= 2
    assert {shape.rpartition(' ')[2] for shape in divided['shapes']} == {'1', '2'}  # stages
    assert {trainer['samples'] for trainer in told.values()} == {divided['samples_expected']}
    found = json.loads((run_dir / 'out' / 'found.json').read_text())
    letters = len(chimera_gpt.corpus()[2])
    assert found['divided']['tested'] < 0.7 * math.log(letters)  # what one knows who knows nothing
    assert found['divided']['tested'] == pytest.approx(found['whole']['tested'], rel=1e-3)
    assert (
        found['divided']['written'].startswith('The ')
        and found['divided']['written'] in capsys.readouterr().out
    )
    assert (run_dir / 'out' / 'chimera_gpt.png').read_bytes().startswith(b'\x89PNG')


def test_an_output_folder_that_cannot_be_made_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert chimera_gpt.main(['--out', '/proc/nothing']) == 2
    assert 'cannot be made' in capsys.readouterr().err
