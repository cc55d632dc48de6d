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


def test_the_folder_of_the_run_is_private_ports_are_local_and_the_site_is_asked_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy computer only makes questions rarer."""
    looked, poll, before = list[float](), EventLoop._poll, os.umask(0o022)

    def noted(self: EventLoop, now: float) -> None:
        looked.append(time.monotonic())
        poll(self, now)

    monkeypatch.setattr(EventLoop, '_poll', noted)
    try:
        with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)) as executor:
            wait_until(lambda: len(looked) > 5)
            assert looked[5] - looked[0] >= 0.8 * 5 * 0.2
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
