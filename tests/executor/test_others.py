"""What other users of the submitting computer can see and reach, and how often a site is asked."""

import os
import time
from pathlib import Path

import psutil
import pytest

from parsl_freetrain import BadInput, HtexOptions, LocalSite
from parsl_freetrain.executor.event_loop import EventLoop
from tests.support.processes import descendants
from tests.support.training import freetrain
from tests.support.waiting import wait_until


def test_the_folder_of_the_run_is_private_and_ports_listen_at_the_site_s_interface(
    tmp_path: Path,
) -> None:
    before = os.umask(0o022)
    try:
        with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)) as executor:
            assert os.stat(executor.run_dir).st_mode & 0o777 == 0o700
            listening = {
                (connection.laddr.ip, process.name())
                for process in [psutil.Process(), *descendants()]
                for connection in process.net_connections('inet')
                if connection.status == psutil.CONN_LISTEN
            }
    finally:
        os.umask(before)
    assert {ip.removeprefix('::ffff:') for ip, _ in listening} == {'127.0.0.1'}, listening


def test_the_address_is_that_of_the_interface_if_this_computer_has_it() -> None:
    assert HtexOptions().arguments('lo', 15.0)['address'] == '127.0.0.1'
    assert HtexOptions().arguments('no-such-wire', 15.0)['address'] is None
    assert HtexOptions().arguments(None, 15.0)['address'] is None
    assert HtexOptions(address='10.0.0.1').arguments('lo', 15.0)['address'] == '10.0.0.1'


def test_a_checkpoint_dir_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'checkpoints').mkdir()
    (tmp_path / 'checkpoints').chmod(0o777)
    with (
        pytest.raises(BadInput, match=r'Other users may write to checkpoint_dir .*chmod go-w'),
        freetrain(tmp_path, LocalSite(nodes=1)),
    ):
        pass


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
