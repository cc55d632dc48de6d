"""``workflows/`` in small: searches, and networks that lose ranks and nodes."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from parsl_freetrain.executor.run_lock import RunLock
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.process import fork_server
from site_configs import laptop
from tests.support import template
from workflows import chimera_gpt, cosmoflow, gpt_apart, gpt_sharded, hpo, nas, unet3d


def test_every_architecture_is_a_network() -> None:
    space = {**nas.SPACE, 'width': nas.SPACE['width'][:1]}
    for values in itertools.product(*space.values()):
        model = nas.network(dict(zip(space, values, strict=True)))
        assert model(torch.zeros(2, 64)).shape == (2, 10)


@pytest.mark.long
def test_search_over_architectures(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = nas.main(laptop.config(nodes=2), trials=2, epochs=1)
    assert len(found.trials) == 2 and 0.1 < found.best.values[1] <= 1.0
    assert found.best.values[1] == max(trial.values[1] for trial in found.trials)
    assert 'best: {' in capsys.readouterr().out


@pytest.mark.long
def test_a_smaller_search_over_settings(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        hpo, 'GRID', [s for s in hpo.GRID if s['width'] == 64 and s['lr'] in (0.001, 0.1)]
    )
    monkeypatch.setattr(hpo, 'ROUNDS', ((4, 1), (2, 2), (1, 6)))
    assert hpo.main(laptop.config(nodes=2)) == 0
    found = re.findall(
        r'round (\d): (\d) settings.* best (\S+) with loss ([\d.]+)', capsys.readouterr().out
    )
    assert [(r, n) for r, n, *_ in found] == [('1', '4'), ('2', '2'), ('3', '1')]
    assert found[0][2].startswith('lr0.1')
    # Each round goes on where the one before stopped.
    assert float(found[2][3]) < float(found[1][3]) < float(found[0][3])
    with Journal(run_dir / 'checkpoints' / 'ledger.journal') as reader:
        trainers = reader.history().trainings
    assert len(trainers) == 7 and {t.state for t in trainers} == {'finished'}


@pytest.mark.long
def test_a_pipeline_learns_through_kills(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    written = found['divided']['written']
    assert written.startswith('The ') and written in capsys.readouterr().out
    assert (run_dir / 'out' / 'chimera_gpt.png').read_bytes().startswith(b'\x89PNG')


# What each node and each rank would import in every fragment.
TO_IMPORT = ('workflows.gpt_sharded', *fork_server._FOR_SHARDED)


@pytest.mark.long
def test_sharded_model_learns_through_kills_and_in_other_shapes_to_same_bits(run_dir: Path) -> None:
    out = run_dir / 'with a space'
    for name in ('hurry', 'summary.json', 'checkpoints/sharded/fence'):  # of an earlier run
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('of the first run')
    with template.that_imports(*template.OF_RANKS, *TO_IMPORT):
        assert gpt_sharded.main(['--small', '--out', str(out)]) == 0
    told = json.loads((out / 'summary.json').read_text())
    names = 'weights_equal', 'shapes', 'kills', 'writers', 'samples', 'samples_expected'
    assert tuple(told) == names
    assert told['weights_equal'] is True
    assert told['kills'] >= 2
    assert sum(one != other for one, other in itertools.pairwise(told['shapes'])) >= 3
    assert told['writers'] == 4
    assert told['samples'] == told['samples_expected']
    before = out / 'previous-1'
    assert (before / 'summary.json').read_text() == 'of the first run'
    assert (before / 'checkpoints' / 'sharded' / 'fence').exists()


def test_a_second_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = tmp_path / 'checkpoints'
    checkpoints.mkdir()
    lock = RunLock(checkpoints, 'the first')
    lock.take_folder()
    assert gpt_sharded.main(['--small', '--out', str(tmp_path)]) == 2
    assert f'has the checkpoint_dir {checkpoints}; give each' in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [checkpoints]


@pytest.mark.parametrize('workflow', [chimera_gpt, cosmoflow, gpt_apart, gpt_sharded, unet3d])
def test_a_bad_output_folder_is_a_sentence(
    workflow: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workflow.main(['--small', '--out', '/proc/nothing']) == 2
    [sentence] = capsys.readouterr().err.strip().splitlines()
    assert 'cannot be made' in sentence


@pytest.mark.long
def test_replicas_that_are_killed_at_every_stage_train_the_same_gpt(tmp_path: Path) -> None:
    assert gpt_apart.main(['--small', '--out', str(tmp_path / 'out')]) == 0
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert summary['weights_equal'] is True
    assert (summary['rounds'], summary['pieces']) == (3, 12) and summary['kills'] >= 8
    assert summary['loss'] < 4.3 and abs(summary['loss'] - summary['loss_synchronous']) < 1.0
