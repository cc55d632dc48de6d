"""How often the event loop compares its blocks with what the site says."""

import time
from pathlib import Path

import pytest

from parsl_freetrain import LocalSite
from parsl_freetrain.executor.event_loop import EventLoop
from tests.support.training import freetrain
from tests.support.waiting import wait_until

POLL_S = 0.2


def test_a_site_is_looked_at_no_more_often_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy computer only makes it rarer."""
    looked: list[float] = []
    poll = EventLoop._poll

    def noted(self: EventLoop, now: float) -> None:
        looked.append(time.monotonic())
        poll(self, now)

    monkeypatch.setattr(EventLoop, '_poll', noted)
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=POLL_S)):
        wait_until(lambda: len(looked) > 10)
    assert looked[10] - looked[0] >= 0.8 * 10 * POLL_S
