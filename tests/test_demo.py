"""The demonstration as its user runs it, on a smaller scale."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.programs import run_to_end
from workflows.digits import main

ROOT = Path(__file__).resolve().parent.parent
EPOCHS = 4


@pytest.mark.long
@pytest.mark.usefixtures('nodes_share_a_template')
def test_it_trains_in_holes_and_compares(tmp_path: Path) -> None:
    """One node is killed again and again; the summary adds up, and the weights are equal."""
    schedule = tmp_path / 'holes.csv'
    # Twice as long each time: a busy computer starts no block in a hole shorter than its start.
    killed = ''.join(f'{start},{2 * start},a\n' for start in (15, 30, 60, 120, 240, 480, 960))
    schedule.write_text(f'start_s,end_s,node\n0,15,a\n{killed}0,1920,b\n5,1920,c\n')
    options = f'--idle {schedule} --nodes 3 --epochs {EPOCHS} --step-s 0.055'
    done = run_to_end(
        [sys.executable, '-m', 'workflows.digits', '--out', tmp_path / 'out', *options.split()],
        cwd=ROOT,
        timeout=None,
    )
    assert done.returncode == 0, done.stderr
    assert '\x1b' not in done.stdout  # no control characters into a pipe
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert summary['trainers'].keys() == {'cnn', 'mlp'}
    for trainer in (every := summary['trainers'].values()):
        assert trainer['weights_equal'] is True
        assert trainer['samples'] == trainer['samples_expected'] == EPOCHS * 1437
        assert trainer['accuracy'] == trainer['accuracy_undisturbed'] > 0.9
        assert trainer.keys() >= {'fragments', 'samples_repeated'}
    assert any(one['preempted'] for one in every) and any(one['rescaled'] for one in every)
    assert summary['blocks'] >= summary['blocks_killed'] >= 1
    seconds = summary['node_s']
    assert seconds.keys() == {'offered', 'trained', 'starting', 'checkpointing', 'lost', 'idle'}
    assert 2 * seconds['offered'] == pytest.approx(sum(seconds.values()))  # the others' sum
    assert 'Nodes over time' in (tmp_path / 'out' / 'report.html').read_text()
    assert str(tmp_path / 'out' / 'report.html') in done.stdout


@pytest.mark.long
def test_a_short_schedule_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was in the folder is still in it."""
    out, schedule = tmp_path / 'out', tmp_path / 'holes.csv'
    schedule.write_text('start_s,end_s,node\n0,2,a\n')
    out.mkdir()
    (out / 'mine').write_text('kept')
    options = f'--out {out} --idle {schedule} --nodes 1 --epochs 10000 --resume never'
    assert main(options.split()) == 1
    assert (out / 'previous-1' / 'mine').read_text() == 'kept' and not (out / 'mine').exists()
    said = capsys.readouterr().err
    assert re.search(
        "The schedule of holes has ended before '(cnn|mlp)', at [0-9]+ samples; the same "
        'command continues, with --idle',
        said,
    ), said


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--idle', 'overlap.csv'], 'line 3.*must not overlap'),
        (['--idle', 'absent.csv'], 'There is no file'),
        (['--nodes', '0'], 'nodes is 0; it must be'),
        (['--epochs', '0'], 'must be a number above 0'),
        (['--resume', 'require'], "resume is 'require'"),
        (['--out', '/proc/nothing'], 'cannot be made'),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / 'overlap.csv').write_text('start_s,end_s,node\n0,10,a\n5,20,a\n')
    arguments = [str(tmp_path / a) if a.endswith('.csv') else a for a in arguments]
    assert main(['--out', str(tmp_path / 'out'), *arguments]) == 2
    [sentence] = capsys.readouterr().err.strip().splitlines()
    assert re.search(words, sentence), sentence
