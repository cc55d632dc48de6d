"""The demonstration as its user runs it, on a smaller scale."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parsl_freetrain.training.checkpoint.manifest import MARKER
from tests.support.programs import Program, run_to_end
from tests.support.waiting import LIMIT_S, wait_until
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
@pytest.mark.usefixtures('nodes_share_a_template')
def test_the_same_command_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """To the weights of an undisturbed run; it is held up until it may end."""
    schedule, out, go = (tmp_path / name for name in ('holes.csv', 'out', 'go'))
    schedule.write_text('start_s,end_s,node\n0,1000,a\n0,1000,b\n')
    options = f'--out {out} --idle {schedule} --nodes 2 --epochs 2'.split()
    command = [sys.executable, '-m', 'tests.support.held', go, *options]
    with Program(command, cwd=ROOT, stderr=subprocess.PIPE, process_group=0) as demo:

        def saved() -> set[str]:
            assert demo.poll() is None, demo.communicate()
            return {marker.parts[-3] for marker in out.glob(f'holes/*/ckpt-*/{MARKER}')}

        wait_until(lambda: saved() == {'cnn', 'mlp'})
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, said = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 130 and 'Traceback' not in said
    assert 'Nothing is lost: the same command continues' in said
    go.touch()
    done = run_to_end([*command, '--resume', 'require'], cwd=ROOT, timeout=None)
    assert done.returncode == 0, done.stderr
    for trainer in json.loads((out / 'summary.json').read_text())['trainers'].values():
        assert trainer['weights_equal'] and trainer['samples'] == trainer['samples_expected']


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
