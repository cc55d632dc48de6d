"""Sweeps: all combinations, the same answers in several processes, and what is refused."""

import json
import stat
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from parsl_freetrain.cli.main import main
from parsl_freetrain.replay.scenario import replay
from parsl_freetrain.replay.sweep import requests, row, sweep
from tests.cli.test_replay import NET, refusal
from tests.support.programs import run_to_end

TOOK = r'decision_ms|wall_s'


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    """Growing from 1 to 2 nodes costs 30 samples and gains 10 a second."""
    idle, trainers = tmp_path / 'idle.csv', tmp_path / 'trainers.json'
    idle.write_text('start_s,end_s,node\n0,1000,a\n100,1000,b\n200,900,c\n')
    trainers.write_text(json.dumps([NET, NET | {'name': 'other', 'max_nodes': 1}]))
    return {'idle': idle, 'trainers': trainers}


def arguments(options: dict[str, object], *more: object) -> list[str]:
    given = (part for name, path in options.items() for part in (f'--{name}', path))
    return ['replay', *map(str, (*given, *more))]


def study(folder: Path, **swept: list[object]) -> str:
    path = folder / 'study.toml'
    lines = (f'{name} = {json.dumps(values)}' for name, values in swept.items())
    path.write_text('\n'.join(['[sweep]', *lines]))
    return str(path)


def results(table: pd.DataFrame) -> list[dict[str, Any]]:
    """What does not depend on how fast the machine is."""
    kept = table.drop(columns=list(table.filter(regex=TOOK))).to_dict('records')
    return [{str(name): value for name, value in row.items()} for row in kept]


def test_every_combination_is_row_and_says_what_it_would_alone(options: dict[str, object]) -> None:
    swept: dict[str, list[object]] = {'horizon': [2, 60], 'max_trainers': [1, 'all']}
    swept['solver'] = ['auto', 'equal-share']
    asked = requests(options, swept)
    table = sweep(asked, list(swept))
    assert list(table.columns[:3]) == ['horizon', 'max_trainers', 'solver']
    rows = [tuple(row) for row in table.iloc[:, :3].itertuples(index=False)]
    assert rows == list(product((2.0, 60.0), (1, 2), ('auto', 'equal-share')))
    for found, request in zip(results(table), asked, strict=True):
        alone = results(pd.DataFrame([row(replay(request.scenario()))]))[0]
        assert {name: found[name] for name in alone} == alone
    assert table['efficiency'].nunique() > 2


def test_the_files_hold_what_was_found(
    options: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept: dict[str, list[object]] = {'max-trainers': [1, 'all'], 'objective': ['throughput']}
    swept['from'] = [0, 100]
    more = (study(tmp_path, **swept), '--jobs', 1)
    said = []
    for name in ('out.csv', 'out.parquet'):
        assert main(arguments(options, *more, '--out', tmp_path / name, '--json')) == 0
        said.append(json.loads(capsys.readouterr().out))
    csv, parquet = pd.read_csv(tmp_path / 'out.csv'), pd.read_parquet(tmp_path / 'out.parquet')
    assert results(csv) == results(parquet)
    assert results(parquet) == results(pd.DataFrame(said[1]))
    assert list(csv['from']) == [0, 100, 0, 100]
    assert list(csv['max_trainers']) == [1, 1, 2, 2]


def test_a_human_gets_a_table(
    options: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(options, study(tmp_path, horizon=[2, 60]), '--jobs', 1)) == 0
    said = capsys.readouterr()
    assert said.err == ''  # no bar where nobody looks
    head, *rows = said.out.splitlines()
    assert head.split()[:2] == ['horizon', 'efficiency']
    assert [line.split()[0] for line in rows] == ['2', '60']


def test_one_replay_gives_one_row_and_pictures(options: dict[str, object], tmp_path: Path) -> None:
    out = ('--out', tmp_path / 'one.csv', '--pictures', tmp_path / 'new' / 'pictures')
    assert main(arguments(options, *out)) == 0
    assert len(pd.read_csv(tmp_path / 'one.csv')) == 1
    pictures = tmp_path / 'new' / 'pictures'
    assert stat.S_IMODE(pictures.stat().st_mode) == 0o700
    names = {path.name for path in pictures.iterdir()}
    assert names == {'nodes.png', 'node-seconds.png', 'decisions.png'}
    for path in pictures.iterdir():
        image = imread(path)
        assert min(image.shape[:2]) > 100
        assert len(np.unique(image[::3, ::3].reshape(-1, image.shape[2]), axis=0)) > 20, path


@pytest.mark.long
def test_processes_find_the_same_and_end(options: dict[str, object], tmp_path: Path) -> None:
    swept: dict[str, list[object]] = {'horizon': [2, 60], 'max_trainers': [1, 'all']}
    swept['solver'] = ['auto', 'dp']
    more = (study(tmp_path, **swept), '--jobs', 2, '--pictures', tmp_path / 'pictures', '--json')
    done = run_to_end(
        [sys.executable, '-m', 'parsl_freetrain.cli.main', *arguments(options, *more)],
        more_env={'PYTHONPATH': str(Path(__file__).resolve().parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, '')
    assert results(pd.DataFrame(json.loads(done.stdout))) == results(
        sweep(requests(options, swept), list(swept))
    )
    names = 'efficiency-horizon', 'efficiency-max-trainers', 'node-seconds', 'decisions'
    assert {p.name for p in (tmp_path / 'pictures').iterdir()} == {f'{name}.png' for name in names}


@pytest.mark.parametrize(
    ('swept', 'sentence'),
    [
        ({'luck': [1, 2]}, "A replay has no setting 'luck'; it has idle, swf"),
        ({'trainrs': ['x']}, "A replay has no setting 'trainrs'; it has trainers."),
        ({'horizon': [1, 1]}, 'lists of different values'),
        ({'horizon': []}, 'lists of different values'),
        ({'horizon': [1, 'soon']}, "--horizon is 'soon'; it must be a number"),
        (
            {'max-trainers': [1, 'many']},
            "--max-trainers is 'many'; it must be a whole number, at least 1 or 'all'",
        ),
        ({'nodes': [1, 2.5]}, '--nodes is 2.5; it must be a whole number'),
        ({'nodes': [1, 0]}, 'The first 0 nodes'),
        ({'known-ends': [False, True]}, 'Nothing is known of the ends'),
        ({'horizon': list(range(1, 10002))}, 'ask for 10001 replays'),
    ],
)
def test_bad_input_gets_a_sentence(
    swept: dict[str, list[object]],
    sentence: str,
    options: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sentence in refusal(capsys, *arguments(options, study(tmp_path, **swept))[1:])


def test_where_results_cannot_go(
    options: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, sentence in (
        (['--jobs', '0'], '--jobs is 0'),
        (['--out', 'table.xlsx'], '--out is table.xlsx; its name must end in .csv or .parquet'),
        (['--out', 'nowhere/table.csv'], 'there is no folder nowhere'),
        (['--pictures', str(options['idle'])], 'cannot be made'),
    ):
        assert sentence in refusal(capsys, *arguments(options, *more)[1:])
