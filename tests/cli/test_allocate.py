"""``freetrain allocate``: the contract, constraints, and sentences for what cannot be used."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.allocation.objectives import FIELDS, METRICS
from parsl_freetrain.core.allocation.problem_document import ProblemDocument, TrainerDocument
from tests.support.programs import FREETRAIN, Program
from tests.support.waiting import LIMIT_S

PROGRAM = [*FREETRAIN, 'allocate']
DOCUMENTATION = Path(__file__).resolve().parents[2] / 'docs' / 'command-line.md'
BUFFERED = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}


def trainer(name: str = 'a', **changes: Any) -> dict[str, Any]:
    fields = {'name': name, 'min_nodes': 1, 'max_nodes': 64, 'current_nodes': 3}
    fields |= {'nodes': [0, 1, 2, 4, 8], 'rate': [0, 10, 19, 36, 70]}
    fields |= {'rescale_up_s': 18, 'rescale_down_s': 12, **changes}
    if 'current' in changes and 'current_nodes' not in changes:
        del fields['current_nodes']
    return {key: value for key, value in fields.items() if value is not None}


def problem(*trainers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    every = list(trainers or [trainer()])
    fields = {'id': 'p1', 'horizon_s': 120, 'nodes': 129, 'trainers': every} | changes
    return {key: value for key, value in fields.items() if value is not None}


class Said:
    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.err = status, err
        self.answers = [json.loads(line) for line in out.splitlines()]

    @property
    def allocation(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        assert len(self.answers) == 1
        found: dict[str, Any] = self.answers[0]['allocation']
        return found


class Ask:
    """Runs ``freetrain allocate`` in this process on lines that are written to a file."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path, self._capsys = path, capsys

    def __call__(self, *lines: dict[str, Any] | str | bytes, options: tuple[str, ...] = ()) -> Said:
        texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
        rows = (t if isinstance(t, bytes) else t.encode() for t in texts)
        self._path.write_bytes(b'\n'.join(rows) + b'\n')
        status = main(['allocate', str(self._path), *options])
        seen = self._capsys.readouterr()
        return Said(status, seen.out, seen.err)


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    return Ask(tmp_path / 'problems.jsonl', capsys)


def test_the_answer_has_the_fields_of_the_contract(ask: Ask) -> None:
    said = ask(problem())
    (answer,) = said.answers
    assert list(answer) == [
        'id', 'status', 'objective', 'bound', 'gap', 'solver', 'seconds', 'allocation',
    ]  # fmt: skip
    worth = 120 * 70 - 18 * 27.5
    how = {'status': 'optimal', 'objective': worth, 'bound': worth, 'gap': 0, 'solver': 'dp'}
    assert answer == {'id': 'p1', **how, 'seconds': answer['seconds'], 'allocation': {'a': 8}}
    assert 0 <= answer['seconds'] < 60
    assert said.err == ''


def test_blocks_are_answered_by_block(ask: Ask) -> None:
    blocks: list[dict[str, Any]] = [{'id': 'b0', 'nodes': 4, 'remaining_s': 1800}]
    blocks += [{'id': 'b1', 'nodes': 3, 'remaining_s': None}, {'id': 'b2', 'nodes': 1}]
    at = trainer(current_nodes=None, current={'b0': 3}, max_nodes=3)
    there = trainer('b', current_nodes=None, min_nodes=9)
    said = ask(problem(at, there, blocks=blocks, nodes=None))
    assert said.allocation == {'a': {'b0': 3}, 'b': {}}
    one = [{'id': 'b0', 'nodes': 4, 'remaining_s': 1800}]
    assert ask(problem(at, blocks=one, nodes=None)).allocation == {'a': {'b0': 3}}
    assert ask(problem(trainer(current_nodes=None), blocks=[], nodes=None)).allocation == {'a': {}}


def test_each_trainer_gets_nodes_of_one_class(ask: Ask) -> None:
    blocks = [{'id': 'fast', 'nodes': 4, 'node_class': 'a100'}]
    blocks.append({'id': 'slow', 'nodes': 8, 'node_class': 'cpu'})
    costs = {'current_nodes': None, 'nodes': [1, 8], 'max_nodes': 8}
    gpu = trainer('gpu', rate=None, rates={'a100': [9, 72], 'cpu': [1, 8]}, **costs)
    anywhere = trainer('any', rate=None, rates={'a100': [5, 40], 'cpu': [4, 32]}, **costs)
    asked = problem(anywhere, gpu, blocks=blocks, nodes=None)
    assert ask(asked).allocation == {'any': {'slow': 8}, 'gpu': {'fast': 4}}
    # 'gpu' uses the processors only where it gets nothing else.
    held = problem(anywhere | {'current': {'fast': 4}}, gpu, blocks=blocks, nodes=None)
    assert ask(held | {'horizon_s': 1}).allocation == {'any': {'fast': 4}, 'gpu': {'slow': 8}}
    speedup = problem(anywhere, gpu, blocks=blocks, nodes=None, objective='speedup')
    assert ask(speedup).answers[0]['objective'] == pytest.approx(120 * (4 * 9 + 8))


def test_nodes_that_go_soon_are_worth_little_and_blocks_may_be_apart(ask: Ask) -> None:
    blocks = [{'id': 'stays', 'nodes': 2}, {'id': 'goes', 'nodes': 2, 'remaining_s': 10}]
    at = trainer(current_nodes=None, current={'stays': 2}, max_nodes=4)
    assert ask(problem(at, blocks=blocks, nodes=None)).allocation == {'a': {'stays': 2}}
    longer = [blocks[0], blocks[1] | {'remaining_s': 100}]
    assert ask(problem(at, blocks=longer, nodes=None)).allocation == {'a': {'stays': 2, 'goes': 2}}
    answer = ask(problem(at, blocks=longer, nodes=None, spans_blocks=False))
    assert answer.allocation == {'a': {'stays': 2}}


def test_points_come_in_any_order_and_need_no_zero(ask: Ask) -> None:
    in_order = trainer(nodes=[0, 1, 2, 4, 8], rate=[0, 19, 10, 70, 36])
    shuffled = trainer(nodes=[4, 8, 1, 2], rate=[70, 36, 19, 10])
    said = ask(problem(in_order), problem(shuffled))
    assert [a['allocation'] for a in said.answers] == [{'a': 4}, {'a': 4}]
    assert [a['objective'] for a in said.answers] == [120 * 70 - 18 * 40] * 2


def test_no_trainers_and_no_nodes(ask: Ask) -> None:
    held = problem(trainer(current_nodes=0), nodes=0)
    said = ask(problem(trainers=[]), held, problem(trainer(current_nodes=None), id=None))
    found = [(a['id'], a['objective'], a['allocation']) for a in said.answers]
    assert found == [('p1', 0.0, {}), ('p1', 0.0, {'a': 0}), (3, 8400.0, {'a': 8})]
    assert [a['status'] for a in said.answers] == ['optimal'] * 3


LINEAR = {'nodes': [1, 100], 'rate': [1, 100], 'current_nodes': 0}
LINEAR |= {'rescale_up_s': 0, 'rescale_down_s': 0}


RESTING, FOUR = {'min_rescale_interval_s': 60}, {'max_nodes': 4}


def test_constraints(ask: Ask) -> None:
    for changes, of_a, of_b, expected in (
        ({'max_nodes': 6}, {'max_nodes': 4}, {}, (4, 2)),
        ({'keep_free': 7}, {'max_nodes': 2}, {'max_nodes': 2}, (2, 1)),
        ({'keep_free': 99}, {}, {}, (0, 0)),
        ({'user_nodes': {'anna': 3, 'nobody': 0}}, {'user': 'anna'}, {'max_nodes': 5}, (3, 5)),
        (
            {'group_nodes': {'g': 4}},
            {'group': 'g', 'max_nodes': 3},
            {'group': 'g', 'max_nodes': 1},
            (3, 1),
        ),
        ({'budget_node_s': 240}, {'max_nodes': 1}, {'max_nodes': 5}, (1, 1)),
        ({'user_budget_node_s': {'anna': 250}}, {'user': 'anna'}, {'max_nodes': 5}, (2, 5)),
        ({'group_budget_node_s': {'g': 0}}, {'group': 'g'}, {'max_nodes': 5}, (0, 5)),
        ({}, {'share': 4}, {'rate': [10, 1000]}, (4, 6)),
        ({}, {'sizes': [4, 2, 8, 8], 'rate': [10, 1000]}, {'sizes': [1, 4]}, (8, 1)),
        (RESTING, {'since_rescale_s': 59, 'current_nodes': 2}, {'max_nodes': 4}, (2, 4)),
        (RESTING, {'since_rescale_s': 60, 'current_nodes': 2, 'max_nodes': 6}, FOUR, (6, 4)),
        (RESTING, {'since_rescale_s': 5, 'max_nodes': 6}, {'max_nodes': 4}, (6, 4)),
    ):
        both = trainer('a', **LINEAR | of_a), trainer('b', **LINEAR | of_b)
        said = ask(problem(*both, nodes=10, **changes))
        assert said.allocation == dict(zip('ab', expected, strict=True))
        assert said.answers[0]['status'] == 'optimal'


def test_shares_that_cannot_all_be_kept_are_infeasible(ask: Ask) -> None:
    held = [trainer(name, **LINEAR | {'share': 6, 'current_nodes': 5}) for name in 'ab']
    said = ask(problem(*held, nodes=10))
    assert said.status == 0
    assert said.answers[0]['status'] == 'infeasible'
    assert said.answers[0]['allocation'] == {'a': 5, 'b': 5}


def test_objectives_named_in_the_problem_and_on_the_command_line(ask: Ask) -> None:
    slow = LINEAR | {'rate': [1, 100], 'max_nodes': 6}
    fast = LINEAR | {'rate': [1000, 100_000], 'max_nodes': 6}

    def shares(
        *options: str,
        a: dict[str, Any] | None = None,
        b: dict[str, Any] | None = None,
        **changes: Any,
    ) -> tuple[int, int]:
        both = trainer('a', **slow | (a or {})), trainer('b', **fast | (b or {}))
        of = problem(*both, nodes=8, **changes)
        found = ask(of, options=options).allocation
        return found['a'], found['b']

    assert shares() == (2, 6)
    assert shares(objective='priority', a={'priority': 3}) == (6, 2)
    urgent = {'deadline_s': 100, 'remaining_samples': 500}
    assert shares(objective='deadline', a=urgent)[0] >= 5
    assert shares(objective='rate / rate1 * priority', a={'priority': 3}) == (6, 2)
    assert shares('--objective', 'throughput', objective='priority', a={'priority': 3}) == (2, 6)
    less = {'efficiency': {'nodes': [4, 1], 'value': [0.0, 1.0]}}
    assert shares(objective='goodput', b=less) == (6, 2)


BAD = [
    ('{"id": "p9", "horizon_s": 1,', ['it is not JSON', 'column 29']),
    ('[1, 2]', ['JSON object, [1, 2] is not']),
    ('{"a": NaN}', ['NaN is not a number']),
    ('{"id": 1, "id": 2}', ["the field 'id' twice"]),
    ('[' * 100_000, ['nested too deeply']),
    ('{"nodes": ' + '9' * 5000 + '}', ['too many digits']),
    (b'{"id": "\xff"}', ['not UTF-8 at byte 9']),
    (problem(id=None, horizon_s=None), ['horizon_s is missing']),
    (problem(horizon_s=0), ["problem 'p1'", 'horizon_s is 0', 'above 0']),
    (problem(horizon_s=True), ['horizon_s is True']),
    (json.dumps(problem()).replace('120', '1e999'), ['horizon_s is inf', 'at most']),
    (problem(nodes=4.0), ['nodes is 4.0', 'whole number']),
    (problem(nodes=2_000_000), ['nodes is 2000000', '1000000']),
    (problem(nodes=None), ['nodes is missing', 'blocks']),
    (problem(blocks=[]), ['both nodes and blocks']),
    (
        problem(blocks=[{'id': 'b', 'nodes': 1}] * 2, nodes=None),
        ["2 of the blocks have the id 'b'"],
    ),
    (
        problem(blocks=[{'id': str(i), 'nodes': 999_999} for i in range(2)], nodes=None),
        ['1999998 nodes', '1000000'],
    ),
    (problem(raet=1), ['there is no raet', 'horizon_s']),
    (problem(objective='fame'), ["no objective 'fame'", 'throughput']),
    (problem(objective='rate +* 2'), ['column']),
    (problem(objective='rate / (nodes - 1)'), ["'a'", 'at 1 node']),
    (problem(trainer(deadline_s=5), objective='deadline'), ["'a'", 'remaining_samples']),
    (problem(trainers={'a': 1}), ["trainers is {'a': 1}", 'list']),
    (problem(trainer(), trainer('b', raet=[1])), ["trainer 'b'", 'no raet', 'say rate']),
    (problem(trainer(), trainer() | {'name': 5}), ['trainer 5', 'name is 5']),
    (problem(trainer(name='')), ['trainers[0]', "name is ''; it must be a text of 1"]),
    (problem(trainer(max_nodes=None)), ["trainer 'a'", 'max_nodes is missing']),
    (problem(trainer(), trainer()), ["2 of the trainers have the name 'a'"]),
    (
        problem(trainer(min_nodes=5, max_nodes=4)),
        ["trainer 'a'", 'min_nodes is 5', 'max_nodes, which is 4'],
    ),
    (
        problem(trainer(nodes=[4, 8], rate=[36, 70])),
        ["trainer 'a'", 'nodes starts at 4', 'min_nodes, which is 1'],
    ),
    (problem(trainer(nodes=[0, 1], rate=[0, -3])), ["trainer 'a'", 'rate[1] is -3']),
    (problem(trainer(nodes=[0, 1], rate=[5, 10])), ["trainer 'a'", 'rate is 5 at 0 nodes']),
    (problem(trainer(nodes=[1, 2, 1], rate=[1, 2, 3])), ["trainer 'a'", 'nodes has 1 2 times']),
    (problem(trainer(nodes=[1, 2], rate=[1])), ["trainer 'a'", 'nodes has 2 entries and rate 1']),
    (problem(trainer(nodes=[], rate=[])), ["trainer 'a'", 'nodes is []']),
    (problem(trainer(current_nodes=130)), ["trainer 'a'", 'current_nodes is 130', '129']),
    (
        problem(trainer(current_nodes=70), trainer('b', current_nodes=70)),
        ["trainer 'b'", '140', '129'],
    ),
    (
        problem(
            trainer(rate=None, rates={'h100': [0] * 5}, current_nodes=None),
            blocks=[{'id': 'b', 'nodes': 4, 'node_class': 'a40'}, {'id': 'c', 'nodes': 4}],
            nodes=None,
        ),
        ["trainer 'a'", "the node class 'h100', which no block has; the blocks have 'a40'"],
    ),
    (
        problem(
            trainer(current={'b': 1, 'c': 1}, current_nodes=None),
            blocks=[
                {'id': 'b', 'nodes': 4, 'node_class': 'a40'},
                {'id': 'c', 'nodes': 4, 'node_class': 'cpu'},
            ],
            nodes=None,
        ),
        ["trainer 'a'", 'nodes of the classes a40, cpu', 'one class at a time'],
    ),
    (problem(trainer(rate=None)), ["trainer 'a'", 'either rate, or rates']),
    (problem(trainer(rates={'a': [1] * 5})), ["trainer 'a'", 'either rate, or rates']),
    (
        problem(trainer(current={'b': 1}, current_nodes=None)),
        ["trainer 'a'", 'current is for problems with blocks'],
    ),
    (
        problem(trainer(), blocks=[{'id': 'b', 'nodes': 4}], nodes=None),
        ["trainer 'a'", 'current_nodes is for problems without'],
    ),
    (
        problem(
            trainer(current={'c': 1}, current_nodes=None),
            blocks=[{'id': 'b', 'nodes': 4}],
            nodes=None,
        ),
        ["the block 'c'"],
    ),
    (
        problem(
            trainer(current={'b': 3}, current_nodes=None),
            blocks=[{'id': 'b', 'nodes': 2}, {'id': 'c', 'nodes': 2}],
            nodes=None,
        ),
        ["trainer 'a'", "3 nodes of block 'b', which has 2"],
    ),
    (problem(trainer(sizes=[65])), ["trainer 'a'", 'none of sizes']),
    (problem(trainer(sizes=[4], share=5)), ["trainer 'a'", 'share is 5']),
    (
        problem(trainer(efficiency={'nodes': [1], 'value': [1.5]})),
        ["trainer 'a'", 'efficiency: value[0] is 1.5'],
    ),
    (
        problem(trainer(efficiency={'nodes': [1], 'value': []})),
        ["trainer 'a'", 'efficiency.nodes has 1 entries'],
    ),
    (
        problem(trainer(efficiency={'nodes': [1], 'valu': [1]})),
        ["trainer 'a'", 'efficiency: value is missing'],
    ),
    (problem(user_nodes={'an\nna': -1}), ['an\\nna']),
    (problem(trainer(name='a\nb\x1b[31m', rate=[1])), [r"'a\nb\x1b[31m'"]),
    (problem(trainer(name='\ud800', rate=[1])), [r"trainer '\ud800'", 'must be a text']),
]


@pytest.mark.parametrize(('line', 'says'), BAD, ids=[says[-1] for _, says in BAD])
def test_bad_line_gets_sentence_and_others_an_answer(ask: Ask, line: Any, says: list[str]) -> None:
    said = ask(problem(id='before'), line, problem(id='after'))
    assert said.status == 2
    assert [answer['id'] for answer in said.answers] == ['before', 'after']
    (sentence,) = said.err.splitlines()
    assert sentence.isprintable()
    assert sentence.startswith('freetrain: ')
    assert 'problems.jsonl, line 2: ' in sentence
    assert sentence.endswith('.')
    assert len(sentence) < 700
    for part in says:
        assert part in sentence


def test_a_solver_that_cannot_solve_a_problem_says_so(ask: Ask) -> None:
    of = problem(trainer(user='u'), trainer('b', user='u'), trainer('c'), user_nodes={'u': 3})
    said = ask(of, problem(), options=('--solver', 'dp'))
    assert (said.status, len(said.answers)) == (2, 1)
    assert 'line 1' in said.err
    assert len(said.err.splitlines()) == 1
    assert ask(of, options=('--solver', 'milp')).answers[0]['solver'] == 'milp'


@pytest.mark.parametrize('solver', ['auto', 'dp', 'milp', 'equal-share'])
def test_every_solver_answers(ask: Ask, solver: str) -> None:
    (answer,) = ask(problem(), options=('--solver', solver)).answers
    assert answer['allocation']['a'] > 0
    assert answer['solver'] == {'auto': 'dp'}.get(solver, solver)


def test_blank_lines_are_counted_and_skipped_and_nothing_is_nothing(ask: Ask) -> None:
    said = ask('', problem(id=None), '  \t', 'x')
    assert [answer['id'] for answer in said.answers] == [2]
    assert 'line 4' in said.err
    empty = ask('')
    assert (empty.status, empty.answers, empty.err) == (0, [], '')
    assert ask(b'\xef\xbb\xbf' + json.dumps(problem()).encode() + b'\r').status == 0


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, why in ((tmp_path / 'none', 'No such file'), (tmp_path, 'directory')):
        assert main(['allocate', str(path)]) == 2
        said = capsys.readouterr()
        assert why in said.err
        assert str(path) in said.err
        assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ('options', 'says'),
    [
        (('--solver', 'gurobi'), 'gurobi'),
        (('--time-limit', '0'), 'time-limit is 0'),
        (('--time-limit', 'nan'), 'time-limit is nan'),
        (('--objective', 'fame'), "no objective 'fame'"),
        (('--frobnicate',), 'frobnicate'),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert main(['allocate', str(tmp_path / 'none'), *options]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.out == ''
    assert len(said.err.splitlines()) == 1


def test_the_documentation_names_every_field_and_objective() -> None:
    text = DOCUMENTATION.read_text()
    objectives = DOCUMENTATION.with_name('objectives.md').read_text()
    for model in (ProblemDocument, TrainerDocument):
        assert all(f'`{name}`' in text or f'"{name}"' in text for name in model.__struct_fields__)
    assert all(f'| `{name}` |' in objectives for name in (*METRICS, *FIELDS))


def test_another_program_can_talk_to_it() -> None:
    with Program([*PROGRAM, '-'], stderr=subprocess.PIPE, env=BUFFERED) as running:
        for name in ('first', 'second'):
            running.stdin.write(json.dumps(problem(id=name)) + '\n')
            running.stdin.flush()
            assert json.loads(running.said())['id'] == name
        out, err = running.communicate('x\n', timeout=LIMIT_S)
    assert (running.returncode, out) == (2, '')
    assert err.startswith('freetrain: standard input, line 3: it is not JSON')


def test_whoever_has_read_enough_may_go() -> None:
    lines = (json.dumps(problem()) + '\n') * 2000
    with Program([*PROGRAM, '-'], stderr=subprocess.PIPE, env=BUFFERED) as running:
        running.stdout.close()
        vars(running)['stdout'] = None
        _, err = running.communicate(lines, timeout=LIMIT_S)
    assert (running.returncode, err) == (0, '')
