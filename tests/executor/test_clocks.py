"""Holes with a known end cost no work, whatever the clocks of their nodes say."""

import logging
import math
from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, FragmentContext, LocalSite, freetrain_app
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.host.clocks import NodeClocks
from parsl_freetrain.journal.read import Journal
from tests.support.training import fit, freetrain
from tests.support.waiting import wait_until


def with_another_clock(ctx: FragmentContext, ahead_s: float) -> None:
    import time

    now = time.time
    time.time = lambda: now() + ahead_s
    fit(ctx, pause_s=0.2)


@pytest.mark.long
def test_training_goes_on_in_hole_after_hole_whatever_its_nodes_clock_says(tmp_path: Path) -> None:
    """Each fragment saves before its hole ends, and repeats nothing. Ahead, holes seemed to have
    ended; behind, the checkpoint before the end was missed.
    """
    holes, at, spells = tmp_path / 'holes.csv', 0, ''
    for long_s in (7, 14, 14, 28, 28, 56, 56, 112, 112):  # on a busy computer, starts take long
        spells += ''.join(f'{at},{at + long_s},{node}\n' for node in ('n0', 'n1'))
        at += long_s + 1
    holes.write_text('start_s,end_s,node\n' + spells)
    site = LocalSite(nodes=2, schedule=str(holes), taken='known', poll_s=0.2)
    app = freetrain_app(max_nodes=1, total_epochs=10**6, checkpoints=Checkpoints(every_s=1000.0))
    with freetrain(tmp_path, site, retries=1000):
        futures = [
            app(with_another_clock)(ahead_s, trainer_name=name)
            for name, ahead_s in (('ahead', 3600.0), ('behind', -3600.0))
        ]
        with Journal(tmp_path / 'checkpoints' / 'ledger.journal') as journal:

            def saved(name: str) -> list[ev.FragmentEnded]:
                found = (event for _, event in journal.events(ev.FragmentEnded))
                ended = [event for event in found if isinstance(event, ev.FragmentEnded)]
                mine = [event for event in ended if event.trainer == name and event.committed]
                return [event for event in mine if event.ending == 'stopped']

            wait_until(lambda: all(len(saved(future.name)) >= 2 for future in futures))
            each = [saved(future.name)[:2] for future in futures]
        for future in futures:
            future.cancel()
        wait_until(lambda: all(future.done() for future in futures))
    for first, second in each:
        assert 0 < (first.committed or 0) < (second.committed or 0), 'each hole has saved'
        assert all(e.committed == (e.reached or e.samples) for e in (first, second)), 'all of it'
        assert all(e.start_s is not None and 0 < e.start_s < 600 for e in (first, second))


def test_a_node_whose_clock_is_off_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clocks = NodeClocks()
    with caplog.at_level(logging.WARNING):
        clocks.measured('n1', 100.0, 101.0, 105.0)  # read between both, however long that took
        clocks.measured('n1', -math.inf, 90.0, 105.0)
        clocks.measured('n2', 100.0, 125.0, 105.0)
        clocks.measured('n2', 100.0, 126.0, 106.0)
        clocks.measured('n3', 100.0, 40.0, 105.0)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition('. ')[0] for line in said] == [
        "The clock of node n2 is 20 s ahead of the submitting computer's",
        "The clock of node n3 is 60 s behind the submitting computer's",
    ]
