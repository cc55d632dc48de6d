"""``freetrain holes`` and ``freetrain plan`` on a real cluster: all is shown, nothing is sent."""

import json
from pathlib import Path

import pytest

from parsl_freetrain.cli.main import main
from tests.support.slurm import Cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def toml(tmp_path: Path) -> str:
    file = tmp_path / 'site.toml'
    file.write_text('[slurm]\npartition = "debug"\npoll_s = 0.5\n')
    return str(file)


@pytest.mark.slurm
def test_holes_and_plan_show_everything_and_send_nothing(
    slurm: Cluster, toml: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    slurm.submit('--nodes=1', '--time=10')
    slurm.wait(lambda: slurm.idle_nodes() == 3)
    assert main(['holes', '--site', toml, '--json']) == 0
    holes = json.loads(capsys.readouterr().out)
    assert [hole.keys() for hole in holes] == [{'nodes', 'until_s', 'queue', 'names'}] * 2
    found = [(hole['nodes'], hole['until_s'], hole['queue']) for hole in holes]
    assert found == [(2, None, 'debug'), (1, None, 'debug')]
    assert main(['holes', '--site', toml]) == 0
    assert 'debug' in capsys.readouterr().out
    assert main(['plan', '--site', toml, '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    blocks = told['blocks']
    assert [block['nodes'] for block in blocks] == [2, 1] and told['trainers'] == []
    assert main(['plan', '--site', toml]) == 0
    said = capsys.readouterr().out
    assert '#SBATCH --time=5' in said  # nothing is planned: longest_s
    assert 'for 300 s, or until a job of others waits that would start on its nodes; it co' in said
    trainers = tmp_path / 'trainers.json'
    trainers.write_text(
        '[{"name": "cnn", "max_nodes": 4, "total_samples": 1000000, "nodes": [1, 4], '
        '"samples_per_s": [10, 40]}]'
    )
    assert main(['plan', '--site', toml, '--trainers', str(trainers), '--json']) == 0
    expected = json.loads(capsys.readouterr().out)
    assert [block['nodes'] for block in expected['blocks']] == [2, 1]
    # Nobody wants these nodes: both blocks have all of the 10 minutes that the partition allows,
    # and they end together.
    assert expected['trainers'] == [
        {'trainer': 'cnn', 'left': 1_000_000, 'samples': [300 * 30.0] * 2, 'finish_s': [None, None]}
    ]
    assert main(['plan', '--site', toml, '--trainers', str(trainers)]) == 0
    assert 'of the 1,000,000 that are left; not finished in these holes' in capsys.readouterr().out
    script = tmp_path / 'block.sh'
    script.write_text(blocks[0]['script'])
    slurm.run('sbatch', '--test-only', str(script))  # Slurm would take it as it is
    assert len(slurm.run('squeue', '-h', '-a').splitlines()) == 1


@pytest.mark.slurm
def test_a_python_file_and_its_name_are_a_site_too(
    slurm: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['holes', '--site', str(ROOT / 'site_configs' / 'slurm_generic.py'), '--json']) == 0
    assert [hole['nodes'] for hole in json.loads(capsys.readouterr().out)] == [4]
    assert main(['plan', '--site', 'slurm_generic', '--json']) == 0
    assert [block['nodes'] for block in json.loads(capsys.readouterr().out)['blocks']] == [4]


def test_this_computer_has_holes_but_no_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['holes', '--site', 'local', '--json']) == 0
    assert json.loads(capsys.readouterr().out) == [
        {'nodes': 2, 'until_s': None, 'queue': '', 'names': ['slot00', 'slot01']}
    ]
    for verb in ('holes', 'plan'):
        assert main([verb]) == 2
        assert 'Name a site with --site: one of local, ' in capsys.readouterr().err
    assert main(['plan', '--site', 'local']) == 2
    assert 'no batch scripts' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('site', 'sentence'),
    [
        ('nosuch', "There is no site 'nosuch'"),
        ('nosuch.py', 'cannot be read'),
        ('nosuch.toml', 'cannot be read'),
        ('broken.py', 'ZeroDivisionError'),
        ('empty.py', 'must return a parsl.config.Config with a FreeTrainExecutor'),
    ],
)
def test_bad_sites_get_a_sentence(
    run_dir: Path, capsys: pytest.CaptureFixture[str], site: str, sentence: str
) -> None:
    (run_dir / 'broken.py').write_text('1 / 0\n')
    (run_dir / 'empty.py').write_text('def config():\n    return None\n')
    assert main(['holes', '--site', site]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ''


def test_without_slurm_there_is_a_sentence(
    toml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv('PATH', '/nowhere')
    assert main(['plan', '--site', toml]) == 2
    assert 'There is no Slurm here' in capsys.readouterr().err


@pytest.mark.slurm
def test_a_scheduler_that_does_not_answer_gets_a_sentence(
    slurm: Cluster, toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.stop_scheduler()
    try:
        assert main(['holes', '--site', toml]) == 1
    finally:
        slurm.start_scheduler()
    said = capsys.readouterr()
    assert (
        'scontrol show partition failed' in said.err and 'should not have happened' not in said.err
    )
    assert len(said.err.splitlines()) == 1
