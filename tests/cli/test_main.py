"""The program ``freetrain`` itself: help, verbs, errors; which ledger, run and trainer is meant."""

import json
import sys
from pathlib import Path

import pytest

from parsl_freetrain import __version__
from parsl_freetrain.cli import main as program
from parsl_freetrain.cli.main import VERBS, main
from parsl_freetrain.cli.where import ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.runs import nearest, run_named, trainer_named
from tests.support.programs import run_to_end

HEAVY = ('torch', 'parsl', 'pandas', 'matplotlib', 'pulp', 'highspy')


def loaded_after(*arguments: str) -> set[str]:
    """Top-level modules that are loaded after the program has run in a fresh process."""
    code = (
        'import json, sys; from parsl_freetrain.cli.main import main; status = main(sys.argv[1:]); '
        'print(json.dumps([status, sorted({m.split(".")[0] for m in sys.modules})]))'
    )
    done = run_to_end([sys.executable, '-c', code, *arguments], check=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stdout
    return set(modules)


def test_the_list_of_verbs_loads_no_verb() -> None:
    assert loaded_after('--help').isdisjoint({*HEAVY, 'numpy', 'pydantic'})


def test_help_on_a_verb_loads_neither_torch_nor_parsl() -> None:
    """Each in a copy of a process that has helped on the first one only."""
    code = (
        'import os, sys\nfrom parsl_freetrain.cli.main import VERBS, main\n'
        'assert main([next(iter(VERBS)), "--help"]) == 0\n'
        'for verb in VERBS:\n'
        '    if not (pid := os.fork()):\n'
        '        status = main([verb, "--help"])\n'
        '        os._exit(status or "torch" in sys.modules or "parsl" in sys.modules)\n'
        '    assert os.waitpid(pid, 0)[1] == 0, verb\n'
    )
    done = run_to_end([sys.executable, '-c', code])
    assert done.returncode == 0, done.stderr


def test_an_easy_problem_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    path = tmp_path / 'problems.jsonl'
    path.write_text('{"horizon_s": 1, "nodes": 1, "trainers": []}\n')
    assert loaded_after('allocate', str(path)).isdisjoint(
        {'torch', 'parsl', 'pandas', 'matplotlib'}
    )


@pytest.mark.parametrize('arguments', [[], ['--help']])
def test_help_names_every_verb(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert all(verb in said.out for verb in VERBS)
    assert said.err == ''


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--version']) == 0
    assert capsys.readouterr().out == f'freetrain {__version__}\n'


def test_wrong_usage_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        ('alocate x', "Did you mean 'allocate'"),
        ('allocate', 'FILE'),
        ('allocate a b', 'b'),
        ('--versio', '--versio'),
        ('run train.py --seeds 2', 'as in freetrain run FILE -- --seeds; see'),
    ):
        assert main(arguments.split()) == 2
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ('', 1)
        assert says in said.err
        assert said.err.endswith(' --help.\n')


def test_a_defect_of_ours_is_one_line_and_a_traceback_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(verb: str) -> object:
        raise RuntimeError('two\nlines')

    monkeypatch.setattr(program, 'command_of', broken)
    assert main(['allocate', 'x']) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert 'RuntimeError: two lines' in said
    assert 'FREETRAIN_DEBUG=1' in said
    monkeypatch.setenv('FREETRAIN_DEBUG', '1')
    assert main(['allocate', 'x']) == 1
    assert 'Traceback' in capsys.readouterr().err


def test_an_interrupt_ends_it_with_the_shells_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(verb: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, 'command_of', interrupted)
    assert main(['allocate', 'x']) == 130
    assert capsys.readouterr().err == ''


def test_nearest_ledger_from_here_upwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / 'a' / 'b'
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    with pytest.raises(
        BadInput, match='There is no ledger.journal in .*name its checkpoint_dir with --ledger'
    ):
        ledger_at(None)
    above = tmp_path / 'checkpoints' / 'ledger.journal'
    above.parent.mkdir()
    above.touch()
    assert ledger_at(None) == above
    here = deep / 'ledger.journal'
    here.touch()
    assert ledger_at(None) == here
    assert ledger_at(tmp_path) == ledger_at(above.parent) == ledger_at(above) == above
    for given in (tmp_path / 'none', deep.parent):
        with pytest.raises(BadInput, match=r'no run with the ledger .*name the ledger\.journal'):
            ledger_at(given)


def test_runs_are_named_by_their_beginning() -> None:
    runs = ['3fa0', '3fb1', '77aa']
    assert run_named(runs, None) is None
    assert run_named(runs, '77') == '77aa'
    assert run_named(runs, '3fa0') == '3fa0'
    with pytest.raises(BadInput, match="2 runs .*'3f': '3fa0', '3fb1'; give more"):
        run_named(runs, '3f')
    with pytest.raises(BadInput, match="no run '78aa' in this ledger; it has '77aa'"):
        run_named(runs, '78aa')
    with pytest.raises(BadInput, match='it has none'):
        run_named([], 'x')


def test_the_nearest_names_come_first_and_not_all_of_a_thousand() -> None:
    names = [*(f'trainer-{i}' for i in range(1000)), 'mlp', 'cnn']
    assert nearest('cn', names)[0] == 'cnn'
    assert trainer_named(names, 'mlp') == 'mlp'
    with pytest.raises(BadInput, match="no trainer 'CNN' .* has 'cnn', .* and 994 more"):
        trainer_named(names, 'CNN')
