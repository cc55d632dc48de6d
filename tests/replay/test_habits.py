"""Files of habits, learned from one record and used in a replay of another."""

import json
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.main import main

TRAINERS = """[{"name": "a", "max_nodes": 4, "total_samples": 1e9, "nodes": [1, 4],
"samples_per_s": [10, 39], "rescale_up_s": 5, "rescale_down_s": 5}, {"name": "b", "max_nodes": 2,
"total_samples": 1e9, "nodes": [1, 2], "samples_per_s": [10, 19.8], "rescale_up_s": 5,
"rescale_down_s": 5}]"""


def record(path: Path, prefix: str, weeks: range) -> Path:
    """Eight nodes, of which six can be used: every 1,000 s the first two are taken for 500 s."""
    rows = []
    for k in weeks:
        rows += [f'{1000 * k},{1000 * k + 500},{prefix}{i}' for i in range(2)]
    rows += [f'{1000 * weeks[0]},{1000 * weeks[-1] + 1000},{prefix}{i}' for i in range(2, 8)]
    path.write_text('start_s,end_s,node\n' + '\n'.join(rows) + '\n')
    return path


def test_habits_spare_preemptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (
        str(record(tmp_path / f'{weeks[0]}.csv', 'n', weeks)) for weeks in (range(9), range(9, 19))
    )
    habits, trainers = str(tmp_path / 'habits.json'), tmp_path / 'trainers.json'
    trainers.write_text(TRAINERS)
    assert main(['replay', '--idle', before, '--learn-habits', habits]) == 0
    asked = ['replay', '--trainers', str(trainers), '--from', '9000', '--json', '--idle']

    def answer(*more: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*asked, after, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def by(name: str) -> str:
        (tmp_path / 'study.toml').write_text(f'habits = "{name}"')
        return str(tmp_path / 'study.toml')

    without, learned = answer(), answer(by('habits.json'))
    assert learned['preempted'] == 0 < without['preempted']
    assert without['efficiency'] < learned['efficiency'] <= learned['efficiency_bound']
    other = str(record(tmp_path / 'other.csv', 'x', range(9, 19)))
    assert main([*asked, other, by('habits.json')]) == 2
    assert 'are of another machine, with nodes such as n0, n1' in capsys.readouterr().err
    empty = json.loads(Path(habits).read_text()) | {'nodes': []}
    (tmp_path / 'empty.json').write_text(json.dumps(empty))
    wrong_kind = 'is not a file of habits'
    files = ('trainers.json', wrong_kind), ('empty.json', wrong_kind), ('none', 'cannot be read')
    for wrong, why in files:
        assert main([*asked, after, by(wrong)]) == 2
        assert why in capsys.readouterr().err
    assert main(['replay', '--horizon', '9', '--idle', before, '--learn-habits', habits]) == 2
    assert '--horizon does not go with --learn-habits' in capsys.readouterr().err
