"""What is done off the event loop."""

import threading

import pytest

from parsl_freetrain.executor import off_loop
from tests.support.waiting import wait_until


def test_output_that_was_stuck_until_its_queue_was_full_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(off_loop, 'LAST_S', 0.0)
    goes_on = threading.Event()
    with off_loop.beside_this_thread():
        off_loop.run(goes_on.wait)
        while off_loop.run(int):
            pass
    goes_on.set()
    wait_until(lambda: all(one.name != 'FreeTrain-Output' for one in threading.enumerate()))
