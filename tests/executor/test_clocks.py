"""Clocks of nodes that differ: nothing of the training depends on them."""

from __future__ import annotations

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
    fit(ctx, pause_s=0.05)


@pytest.mark.parametrize('ahead_s', [3600.0, -3600.0])
def test_a_training_goes_on_in_hole_after_hole_whatever_its_nodes_clock_says(
    tmp_path: Path, ahead_s: float
) -> None:
    """Ahead, the end of a hole seemed to have come, and starts took an hour; behind, the last
    checkpoint before the end was missed.
    """
    holes = tmp_path / 'holes.csv'
    spells = ''.join(f'{start},{start + 8},n0\n' for start in range(0, 600, 9))
    holes.write_text('start_s,end_s,node\n' + spells)
    site = LocalSite(nodes=1, schedule=str(holes), taken='known', poll_s=0.2)
    with freetrain(tmp_path, site, retries=1000):
        future = freetrain_app(
            max_nodes=1, total_epochs=10**6, checkpoints=Checkpoints(every_s=1000.0)
        )(with_another_clock)(ahead_s)
        with Journal(tmp_path / 'checkpoints' / 'ledger.journal') as journal:

            def ended() -> list[ev.FragmentEnded]:
                found = journal.events(ev.FragmentEnded)
                return [e for _, e in found if isinstance(e, ev.FragmentEnded)]

            wait_until(lambda: len([e for e in ended() if e.committed]) >= 2)
            first, second = [e for e in ended() if e.committed][:2]
        future.cancel()
        wait_until(future.done)
    trained = (first.committed or 0, second.committed or 0)
    assert 0 < trained[0] < trained[1], 'each hole has saved what it trained'
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
