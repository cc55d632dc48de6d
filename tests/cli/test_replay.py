"""``freetrain replay``: the contract of its options and of its answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.main import main

DATA = Path(__file__).resolve().parents[3] / 'shared' / 'data'
NET = {'name': 'net', 'max_nodes': 4, 'total_samples': 100000, 'nodes': [0, 1, 4]}
NET |= {'samples_per_s': [0, 10, 40], 'rescale_up_s': 3, 'rescale_down_s': 2}
KEYS = {
    'efficiency', 'compared', 'efficiency_bound', 'work_efficiency', 'samples', 'static_samples',
    'equivalent_nodes', 'idle_node_s', 'used_node_s', 'node_s', 'preempted', 'rescaled',
    'lost_samples', 'trainers_done', 'events', 'decision_ms', 'wall_s',
}  # fmt: skip


@pytest.fixture
def idle(tmp_path: Path) -> Path:
    path = tmp_path / 'idle.csv'
    path.write_text('start_s,end_s,node\n0,1000,a\n0,400,b\n400,1000,c\n')
    return path


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    return written(tmp_path, NET)


def written(folder: Path, *trainers: dict[str, Any]) -> Path:
    path = folder / 'trainers.json'
    path.write_text(json.dumps(trainers))
    return path


def study(folder: Path, **settings: object) -> Path:
    path = folder / 'study.toml'
    path.write_text(''.join(f'{name} = {json.dumps(v)}\n' for name, v in settings.items()))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(['replay', *map(str, arguments), '--json']) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(['replay', *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ''
    assert said.err.startswith('freetrain: ')
    assert said.err.count('\n') == 1
    return said.err


def test_the_answer(idle: Path, trainers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, '--idle', idle, '--trainers', trainers)
    assert set(found) == KEYS
    assert found['samples'] == 1000 * 20 - 2 * 20  # b goes, c comes: one preemption
    assert (found['static_samples'], found['equivalent_nodes']) == (20000, 2)
    assert (found['idle_node_s'], found['used_node_s']) == (2000, 2000)
    assert found['efficiency'] == pytest.approx(0.998)
    assert (found['preempted'], found['rescaled']) == (1, 0)
    assert (found['trainers_done'], found['events']) == (0, 2)
    assert found['lost_samples'] == {'preemption': 40, 'rescale': 0}
    assert set(found['decision_ms']) == {'p50', 'p99', 'max'}


def test_nodes_of_several_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = tmp_path / 'idle.csv'
    idle.write_text('start_s,end_s,node,node_class\n0,1000,a,gpu\n0,1000,b,cpu\n0,1000,c,cpu\n')
    del (net := dict(NET))['samples_per_s']
    net |= {'class_samples_per_s': {'gpu': [0, 10, 40], 'cpu': [0, 6, 24]}}
    found = answer(capsys, '--idle', idle, '--trainers', written(tmp_path, net))
    assert found['samples'] == 12 * 1000
    said = refusal(capsys, '--idle', idle, '--trainers', tmp_path / 'trainers.json', '--solver=dp')
    assert 'not for the dynamic programme; use auto or milp.' in said
    net |= {'class_samples_per_s': {'gpu': [0, 10, 40], 'tpu': [0, 6, 24]}}
    said = refusal(capsys, '--idle', idle, '--trainers', written(tmp_path, net))
    assert "the node class 'tpu'; the trace has cpu, gpu." in said
    for wrong in (net | NET, net | {'class_samples_per_s': {}}):
        said = refusal(capsys, '--idle', idle, '--trainers', written(tmp_path, wrong))
        assert 'give either samples_per_s, or class_samples_per_s' in said


def test_a_human_gets_lines(idle: Path, trainers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['replay', '--idle', str(idle), '--trainers', str(trainers)]) == 0
    said = capsys.readouterr().out
    assert 'efficiency U         0.9980' in said
    assert 'lost to preemptions' in said
    assert 'about to go' not in said


def test_the_window_the_nodes_and_the_costs(
    tmp_path: Path, idle: Path, trainers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = study(tmp_path, idle='idle.csv', trainers='trainers.json', rescale_cost=0)
    found = answer(capsys, free, '--from', 100, '--until', 600, '--nodes', 2)
    assert found['samples'] == 300 * 20 + 200 * 10  # only a and b
    costly = study(tmp_path, rescale_down=5, rescale_cost=2)
    found = answer(capsys, costly, '--idle', idle, '--trainers', trainers)
    assert found['lost_samples']['preemption'] == 10 * 20


def test_settings_arrive(idle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = written(tmp_path, NET | {'max_nodes': 1}, NET | {'name': 'other', 'max_nodes': 1})
    both = '--idle', idle, '--trainers', two, '--max-trainers'
    assert answer(capsys, *both, 1)['used_node_s'] == 1000
    assert answer(capsys, *both, 'all')['used_node_s'] == 2000
    # Growing from 1 to 2 nodes costs 30 samples and gains 10 a second.
    later = tmp_path / 'later.csv'
    later.write_text('start_s,end_s,node\n0,1000,a\n100,1000,b\n')
    one = written(tmp_path, NET)
    assert answer(capsys, '--idle', later, '--trainers', one, '--horizon', 2)['rescaled'] == 0
    assert answer(capsys, '--idle', later, '--trainers', one, '--horizon', 4)['rescaled'] == 1
    apart = study(tmp_path, spans_blocks=False)
    assert answer(capsys, apart, '--idle', later, '--trainers', one)['rescaled'] == 0
    shared = answer(capsys, '--idle', later, '--trainers', one, '--solver', 'equal-share')
    assert shared['rescaled'] == 1


def test_a_made_up_trace_needs_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    week = study(tmp_path, synthetic=3, nodes=40, until=40000)
    found = answer(capsys, week, '--trainers', written(tmp_path, NET))
    assert found['samples'] > 0
    assert found['node_s']['stranded'] == 0


def test_a_job_log_and_its_reservations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two nodes. The one that job 2 gives back is promised until job 1 may take no longer, since job
    # 3 waits for both of them.
    log = tmp_path / 'log.swf'
    jobs = [(1, 0, 0, 1500, 1, 2000), (2, 0, 0, 100, 1, 300), (3, 10, 1490, 600, 2, 1000)]
    jobs.append((4, 20, 2080, 10, 2, 20))
    form = '{0} {1} {2} {3} {4} -1 -1 {4} {5} -1 1 1 1 1 1 1 -1 -1\n'
    log.write_text('; MaxNodes: 2\n' + ''.join(form.format(*job) for job in jobs))
    net = written(tmp_path, NET)
    for known in (False, True):
        asked = study(tmp_path, swf='log.swf', known_ends=known)
        found = answer(capsys, asked, '--trainers', net)
        assert (found['idle_node_s'], found['preempted'], found['samples']) == (1400, 1, 14000 - 20)
    asked = study(tmp_path, sacct='log.swf')
    assert 'it looks like what --swf takes' in refusal(capsys, asked, '--trainers', net)


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        ([], 'Give one trace, with one of --idle, --swf, --sacct, --pbs and --synthetic'),
        (['--idle', 'nowhere.csv'], 'There is no file nowhere.csv'),
        (['--idle', '{idle}', '--from', '5000'], 'idle.csv: There is nothing between 5000 s'),
        (['--idle', '{idle}', '--until', 'nan'], '--until is nan'),
        (['--idle', '{idle}', '--max-trainers', '0'], '--max-trainers is '),
        (['--idle', '{idle}', '--max-trainers', 'some'], '--max-trainers is '),
        (['--idle', '{idle}', '--horizon', '0'], 'horizon'),
        (['--idle', '{idle}', '--solver', 'magic'], 'magic'),
        (['--idle', '{idle}', '--nodes', '0'], 'The first 0 nodes'),
        (['--idle', '{idle}', '--curves', 'guessed'], "--curves is 'guessed'"),
        (['--idle', '{idle}', '--noise', '0.1'], '--noise goes with --curves learned only'),
        (['--idle', '{idle}', '--curves', 'learned', '--noise', '-1'], '--noise is -1'),
        (['--idle', '{idle}', '--curves', 'learned', '--measure-s', '0'], '--measure-s is 0'),
        (['--idle', '{idle}', '--curves', 'learned', '--seed', '-1'], '--seed is -1'),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str],
    sentence: str,
    idle: Path,
    trainers: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = (text.format(idle=idle) for text in arguments)
    assert sentence in refusal(capsys, *given, '--trainers', trainers)


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'synthetic': 1}, 'Give one trace'),
        ({'rescale_cost': -1}, '--rescale-cost is -1'),
        ({'rescale_up': -3}, '--rescale-up is -3'),
        ({'known_ends': True}, 'Nothing is known of the ends'),
        ({'time_limit': 0}, '--time-limit is 0'),
        ({'objective': 'loss'}, "no metric 'loss'"),
        ({'machine_nodes': 9}, 'goes with job logs only'),
        ({'luck': 1}, "A replay has no setting 'luck'; it has idle, swf"),
        ({'sweep': 3}, 'it must be a table of lists'),
    ],
)
def test_a_study_that_cannot_be_used(
    settings: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    idle: Path,
    trainers: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = study(tmp_path, **settings)
    assert sentence in refusal(capsys, asked, '--idle', idle, '--trainers', trainers)
    asked.write_text('[')
    assert 'study.toml is not TOML' in refusal(capsys, asked)
    assert 'absent.toml cannot be read' in refusal(capsys, tmp_path / 'absent.toml')


def test_impossible_trainers(
    idle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "'net' can never run on this trace: it needs 3 nodes" in refusal(
        capsys, '--idle', idle, '--trainers', written(tmp_path, NET | {'min_nodes': 3})
    )
    assert 'No trainer is submitted before 1000 s' in refusal(
        capsys, '--idle', idle, '--trainers', written(tmp_path, NET | {'submit_s': 1000})
    )
    assert 'trainers.json' in refusal(
        capsys, '--idle', idle, '--trainers', written(tmp_path, NET | {'max_nodes': 'many'})
    )
