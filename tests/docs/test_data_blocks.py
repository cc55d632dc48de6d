"""JSON, TOML and SQL of the documentation can be read; ``freetrain allocate`` answers as shown."""

import json
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.tables import write_sqlite
from parsl_freetrain.replay.study import read_study
from parsl_freetrain.replay.sweep import requests
from parsl_freetrain.sites.named import site_in_table
from parsl_freetrain.sites.registry import GROUP
from tests.support.journals import demo_journal
from tests.support.pages import Block, all_blocks

DOCUMENTS = all_blocks('json')
ANSWERS = [block for block in DOCUMENTS if '"status"' in block.code]


def problem_for(answer: Block) -> dict[str, Any]:
    """The problem with the same id, the nearest one above on the same page."""
    wanted = json.loads(answer.code)['id']
    above = [
        json.loads(block.code)
        for block in DOCUMENTS
        if block.page == answer.page and block.line < answer.line
    ]
    found: dict[str, Any] = [
        document for document in above if document.get('id') == wanted and 'horizon_s' in document
    ][-1]
    return found


@pytest.mark.parametrize('block', DOCUMENTS, ids=str)
def test_json_is_one_document(block: Block) -> None:
    json.loads(block.code)


@pytest.mark.parametrize('answer', ANSWERS, ids=str)
def test_answers_are_those_that_are_given(
    answer: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(answer.code)
    file = tmp_path / 'problem.jsonl'
    file.write_text(json.dumps(problem_for(answer)))
    assert main(['allocate', str(file), *(['--explain'] if 'explain' in shown else [])]) == 0
    assert json.loads(capsys.readouterr().out) | {'seconds': 0} == shown | {'seconds': 0}


def test_toml_is_a_site(tmp_path: Path) -> None:
    found = all_blocks('toml')
    assert found
    for number, block in enumerate(found):
        content = tomllib.loads(block.code)
        assert content
        if 'trainers' in content:
            file = tmp_path / 'study.toml'
            file.write_text(block.code)
            settings, swept = read_study(file)
            assert requests(settings, swept)
            continue
        if 'project' in content:  # of a pyproject.toml
            assert GROUP in content['project']['entry-points']
            continue
        file = tmp_path / f'site{number}.toml'
        file.write_text(block.code)
        assert site_in_table(file).name, block


def test_sql_finds_fragments_in_parsls_database(tmp_path: Path) -> None:
    journal = Journal(demo_journal(tmp_path / 'l', seconds=20.0))
    database = tmp_path / 'monitoring.db'
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(
            'CREATE TABLE task (task_id INTEGER, run_id TEXT, task_time_invoked TIMESTAMP)'
        )  # as Parsl's
        rows = [(number,) for number in range(1, 50)]
        db.executemany("INSERT INTO task VALUES (?, 'run-0', '2026-01-01')", rows)
    write_sqlite(journal.history(), database, 'freetrain_')
    for block in all_blocks('sql'):
        with closing(sqlite3.connect(database)) as db:
            assert db.execute(block.code).fetchall(), block
