"""Budgets and minimum shares in ``freetrain status``."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from parsl_freetrain.cli.live.view import LiveView, Screen
from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.status import LimitNow, as_document
from tests.support.told import Told


def test_status_shows_budgets_over_restarts_and_minimum_shares(tmp_path: Path) -> None:
    path = tmp_path / 'ledger.journal'
    budgets = {'user anna': 400.0, 'total': 150.0}
    settings = ControllerSettings(budgets=budgets, min_shares={'user anna': 3})
    for run, begin in (('first', 1000.0), ('second', 2000.0)):
        ledger = Told(path)
        ledger.begin_run(run, at=begin, settings=DecisionSettings(settings, 'auto', 10.0).plain())
        ledger.submitted('a', at=begin, spec={'user': 'anna'})
        ledger.fragment_decided('a', 1, at=begin, nodes=['n0', 'n1'])
        if run == 'first':
            ledger.end_run(at=begin + 50, how='interrupted')
        ledger.close()
    with Journal(path) as journal:
        view = LiveView(journal)
        seen = view.snapshot(2030.0)
        assert seen.limits == (
            LimitNow('budget', 'user anna', 400.0, 160.0),
            LimitNow('budget', 'total', 150.0, 160.0),
            LimitNow('minimum share', 'user anna', 3, 2),
        )
        assert as_document(seen)['limits'][2]['whose'] == 'user anna'
        first = LiveView(journal, run='first').snapshot(2030.0)
        assert [limit.used for limit in first.limits] == pytest.approx([100.0, 100.0, 0])
        out = StringIO()
        Console(file=out, width=80).print(Screen(LiveView(journal).snapshot(2030.0)))
    for words in (
        'budget of user anna: 160 of 400 node-seconds\n',
        'budget of all trainers: 160 of 150 node-seconds, spent',
        'minimum share of user anna: 3 nodes, has 2',
    ):
        assert words in '\n'.join(line.rstrip() for line in out.getvalue().splitlines())
