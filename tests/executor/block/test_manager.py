"""The manager of a node as apps see it."""

from __future__ import annotations

from pathlib import Path

import pytest
from parsl import python_app

from parsl_freetrain.sites.local import LocalSite
from tests.support.training import freetrain
from tests.support.waiting import LIMIT_S


def test_apps_find_modules_beside_the_workflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / 'beside.py').write_text('ANSWER = 42\n')
    monkeypatch.chdir(tmp_path)

    @python_app
    def ask() -> int:
        import beside  # type: ignore[import-not-found]

        return int(beside.ANSWER)

    with freetrain(tmp_path, LocalSite(nodes=1), max_workers_per_node=1):
        assert ask().result(LIMIT_S) == 42
