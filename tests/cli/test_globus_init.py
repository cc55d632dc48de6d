"""``freetrain globus-init``: three files, filled in; those of the user are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parsl_freetrain.cli.globus_init import ENVIRONMENT, FILES, KEPT, SCHEMA, TEMPLATE
from parsl_freetrain.cli.main import main
from parsl_freetrain.executor.globus.registration import FOLDER


def test_files_are_filled_in_and_those_of_the_user_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'mine'
    assert main(['globus-init', str(folder)]) == 2
    assert 'make it with "globus-compute-endpoint configure mine"' in capsys.readouterr().err
    folder.mkdir()
    (folder / SCHEMA).write_text('{}')
    (folder / 'config.yaml').write_text('mine')
    options = ['--site', 'crux', '--account', 'clima"te', '--checkpoint-dir', '/eagle/me']
    assert main(['globus-init', str(folder), *options]) == 0
    schema = json.loads((folder / SCHEMA).read_text())
    assert schema['required'] == []
    assert schema['properties']['queue']['enum'] == ['preemptable', 'workq-route', 'debug']
    template = (folder / TEMPLATE).read_text()
    assert 'name: crux ' in template and 'Polaris' not in template
    assert r'account: {{ account | default("\"clima\\\"te\"") }}' in template
    assert f'PYTHONPATH: "{FOLDER}"' in (folder / ENVIRONMENT).read_text()
    assert (folder / f'{SCHEMA}{KEPT}').read_text() == '{}'
    assert (folder / 'config.yaml').read_text() == 'mine'
    # Once more: nothing changes. What the user has changed since is not lost without a word.
    assert main(['globus-init', str(folder), *options]) == 0
    (folder / SCHEMA).write_text('[]')
    assert main(['globus-init', str(folder), *options]) == 2
    assert f'{SCHEMA}{KEPT} is there already' in capsys.readouterr().err
    assert (folder / SCHEMA).read_text() == '[]'
    assert {one.name for one in folder.iterdir()} == {*FILES, f'{SCHEMA}{KEPT}', 'config.yaml'}


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        (['--site', 'delta'], "no template for the site 'delta'"),
        (['--checkpoint-dir', 'relative'], 'it must be an absolute path'),
    ],
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['globus-init', str(tmp_path), *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
