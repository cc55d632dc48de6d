"""Folders of the workflows whose names have spaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from parsl_freetrain import BadInput, LocalSite, PbsSite
from workflows.command import parsl_folder


def test_parsl_gets_another_folder_and_its_files_go_where_they_belong(tmp_path: Path) -> None:
    with parsl_folder(tmp_path, LocalSite(1)) as folder:
        assert folder == str(tmp_path / 'runinfo')
    out = tmp_path / 'my results'
    for number in range(2):
        with parsl_folder(out, LocalSite(1)) as folder:
            assert ' ' not in folder
            Path(folder, '000').mkdir()
            Path(folder, '000', f'log-{number}').touch()
    found = sorted(str(path.relative_to(out)) for path in out.rglob('log-*'))
    assert found == ['runinfo/000/log-0', 'runinfo/001/log-1']


def test_a_batch_system_cannot_use_such_a_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(BadInput, match='my results has spaces .* name another one with --out'),
        parsl_folder(tmp_path / 'my results', PbsSite(queue='batch')),
    ):
        pytest.fail('it was used')
