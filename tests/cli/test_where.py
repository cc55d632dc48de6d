"""Which ledger, run and trainer a command line means."""

from pathlib import Path

import pytest

from parsl_freetrain.cli.where import ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.runs import nearest, run_named, trainer_named


def test_the_nearest_ledger_from_here_upwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize('given', ['none', 'a'])
def test_what_is_named_must_be_there(tmp_path: Path, given: str) -> None:
    (tmp_path / 'a').mkdir()
    with pytest.raises(
        BadInput, match=r'no run with the ledger .*name the ledger\.journal of a run'
    ):
        ledger_at(tmp_path / given)


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
    with pytest.raises(
        BadInput, match="no trainer 'CNN' in this run; it has 'cnn', .* and 994 more"
    ):
        trainer_named(names, 'CNN')
