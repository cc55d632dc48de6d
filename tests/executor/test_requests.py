"""Requests to a live run, as files."""

import os
import threading
from pathlib import Path

import pytest

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.requests import (
    Cancel,
    Preempt,
    Request,
    RequestAnswer,
    Requests,
    ask,
    requests_folder,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / 'run' / 'ledger.journal'
    path.parent.mkdir()
    path.touch()
    return path


def serve(requests: Requests, over: threading.Event, taken: list[Request]) -> None:
    while not over.wait(0.01):
        for request_id, request in requests.new():
            taken.append(request)
            requests.answer(
                request_id, RequestAnswer(request.trainer == 'cnn', f'for {request.trainer}')
            )


def test_a_request_is_answered_and_leaves_nothing(ledger: Path) -> None:
    requests, over, taken = Requests(requests_folder(ledger)), threading.Event(), list[Request]()
    server = threading.Thread(target=serve, args=(requests, over, taken))
    server.start()
    try:
        assert ask(ledger, Preempt('cnn', 2.5), 30) == 'for cnn'
        with pytest.raises(BadInput, match='for other'):
            ask(ledger, Cancel('other'), 30)
    finally:
        over.set()
        server.join()
    assert taken == [Preempt('cnn', 2.5), Cancel('other')]
    folder = requests_folder(ledger)
    assert not list(folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_run_that_is_over_does_not_answer_nor_a_new_one_in_its_place(ledger: Path) -> None:
    folder = requests_folder(ledger)
    Requests(folder)
    with pytest.raises(BadInput, match=r'No run answered within 0\.2 s'):
        ask(ledger, Preempt('cnn'), 0.2)
    (folder / 'left.request').write_text('{"type": "preempt", "trainer": "cnn"}')
    assert Requests(folder).new() == []


def test_without_a_run_there_is_nobody_to_ask(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match='no run with the ledger'):
        ask(tmp_path / 'ledger.journal', Preempt('cnn'), 1)


@pytest.mark.parametrize(
    'content',
    [
        *('', '{"type": 3', '[1]', '{"type": "burn", "trainer": "cnn"}'),
        '{"type": "preempt", "trainer": "cnn", "grace_s": "long"}',
        '{"type": "preempt", "trainer": "cnn", "grace_s": -1}',
        '{"type": "cancel", "trainer": "cnn", "grace_s": 2}',
    ],
)
def test_nonsense_is_dropped(ledger: Path, content: str) -> None:
    requests = Requests(requests_folder(ledger))
    (requests_folder(ledger) / 'x.request').write_text(content)
    (requests_folder(ledger) / 'link.request').symlink_to('/etc/passwd')
    assert requests.new() == []
    assert not list(requests_folder(ledger).iterdir())


def test_a_folder_that_others_may_write_to_is_refused(ledger: Path) -> None:
    folder = requests_folder(ledger)
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(BadInput, match='Other users may write to folder of requests'):
        Requests(folder)
    with pytest.raises(BadInput, match='Other users may write to folder of requests'):
        ask(ledger, Preempt('cnn'), 1)
    folder.rmdir()
    os.mkfifo(folder)
    with pytest.raises(BadInput, match='must be a folder of yours'):
        Requests(folder)
