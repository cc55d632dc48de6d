"""The workflow ``workflows/gpt_sharded.py`` in small: a sharded model that loses its ranks, and
changes its shape.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from parsl_freetrain.executor.run_lock import RunLock
from parsl_freetrain.training.process import fork_server
from tests.support import template
from workflows import gpt_sharded

# What each node and each rank would import in every fragment.
TO_IMPORT = ('workflows.gpt_sharded', *fork_server._FOR_SHARDED)


@pytest.mark.long
def test_it_learns_through_kills_and_in_other_shapes_to_the_same_bits(run_dir: Path) -> None:
    out = run_dir / 'with a space'
    for name in ('hurry', 'summary.json', 'checkpoints/sharded/fence'):  # of an earlier run
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('of the first run')
    with template.that_imports(*template.OF_RANKS, *TO_IMPORT):
        assert gpt_sharded.main(['--small', '--out', str(out)]) == 0
    told = json.loads((out / 'summary.json').read_text())
    assert list(told) == [
        'weights_equal',
        'shapes',
        'kills',
        'writers',
        'samples',
        'samples_expected',
    ]
    assert told['weights_equal'] is True
    assert told['kills'] >= 2
    assert sum(one != other for one, other in itertools.pairwise(told['shapes'])) >= 3
    assert told['writers'] == 4
    assert told['samples'] == told['samples_expected']
    before = out / 'previous-1'
    assert (before / 'summary.json').read_text() == 'of the first run'
    assert (before / 'checkpoints' / 'sharded' / 'fence').exists()


def test_a_second_run_beside_a_live_one_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / 'checkpoints'
    checkpoints.mkdir()
    lock = RunLock(checkpoints, 'the first')
    lock.take_folder()
    assert gpt_sharded.main(['--small', '--out', str(tmp_path)]) == 2
    assert f'checkpoint_dir {checkpoints} is alive' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [checkpoints]


def test_an_output_folder_that_cannot_be_made_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpt_sharded.main(['--out', '/proc/nothing']) == 2
    assert 'cannot be made' in capsys.readouterr().err
