"""``freetrain watch --web``: access to the page, and the page in a real browser during a run."""

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect

from parsl_freetrain.cli.live import web
from parsl_freetrain.cli.live.web import LivePage, Page
from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from tests.support.browser import PHONE, tab
from tests.support.browser import browser as browser  # a fixture
from tests.support.programs import FREETRAIN, Program, run_to_end
from tests.support.told import Told
from tests.support.waiting import LIMIT_S, wait_until

HOSTILE = '<img src=x onerror="document.title=\'broken\'">'
CURVE = {'nodes': [1, 2], 'rate': [100.0, 200.0]}


@contextmanager
def live_run(folder: Path) -> Iterator[Told]:
    """The ledger of a run that goes on: a trainer with 2 nodes, one that waits, and two blocks."""
    now = time.time()
    ledger = Told(folder / 'ledger.journal')
    ledger.begin_run('run-1', at=now - 100, command='python x.py')
    ledger.offered([('n0', now - 100, None), ('n1', now - 100, None)])
    for name in ('cnn', HOSTILE):
        spec = {'min_nodes': 1, 'max_nodes': 2, 'curve': CURVE}
        ledger.submitted(name, at=now - 100, spec=spec, total_samples=20_000)
    ledger.block_opened('b0', at=now - 100, nodes=2, walltime_s=3600.0, names=['n0', 'n1'])
    for node in ('n0', 'n1'):
        ledger.joined(f'b0/{node}', at=now - 90, block='b0', name=node)
    ledger.block_opened('b1', at=now - 10, nodes=4)
    ledger.fragment_decided('cnn', 1, at=now - 90, nodes=('b0/n0', 'b0/n1'))
    ledger.fragment_started('cnn', 1, at=now - 90, samples=0)
    ledger.fragment_progress('cnn', 1, at=now, samples=12_345, rate=137.0, metrics={'loss': 0.25})
    ledger.commit()
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def served(path: Path) -> Iterator[Page]:
    page = Page(LivePage(Journal(path), None, 0.5).newest)
    try:
        yield page
    finally:
        page.close()


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page(lambda: ('<p>the page', 7))
    try:
        yield page
    finally:
        page.close()


def ask(
    page: Page, path: str, method: str = 'GET', **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    with closing(
        http.client.HTTPConnection(web.HOST, page.server_port, timeout=LIMIT_S)
    ) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def cookie_of(page: Page) -> str:
    status, headers, _ = ask(page, f'/?token={page.token}')
    assert (status, headers['Location']) == (303, '/')
    return headers['Set-Cookie']


def test_only_who_has_the_token_gets_anything(page: Page) -> None:
    token = page.token
    assert len(token) >= 40 and page.address.endswith(f'/?token={token}')
    cookie = cookie_of(page)
    assert 'HttpOnly' in cookie and 'SameSite' in cookie and token in cookie
    name = cookie.partition('=')[0]
    others = '', f'{name}=', f'{name}={token[:-1]}', f'other={token}', f'{name}={token}x'
    for given in (*others, '\xff;;=', f'{name}="'):
        status, headers, text = ask(page, '/', Cookie=given)
        assert status == 403 and token not in str(headers) + text and 'the page' not in text
    status, headers, text = ask(page, '/', Cookie=cookie)
    assert (status, text, headers['Refresh']) == (200, '<p>the page', '7')
    assert headers['Content-Type'].startswith('text/html') and token not in str(headers)
    assert headers['Cache-Control'] == 'no-store'
    # What the address says counts, whatever cookies there are.
    assert ask(page, f'/?token={token}', Cookie=f'{name}=old')[0] == 303
    for wrong in (token[:-1], '%ff%fe'):
        assert ask(page, f'/?token={wrong}', Cookie=cookie)[0] == 403
    assert ask(page, '/absent')[0] == 403
    assert ask(page, '/../web.py', Cookie=cookie)[0] == 404
    assert ask(page, '/', 'POST', Cookie=cookie)[0] == 501


def test_a_name_that_is_not_this_computers_is_refused(page: Page) -> None:
    cookie, port = cookie_of(page), page.server_port
    evil = 'evil.example', f'evil.example:{port}', '127.0.0.1.evil.example', 'localhost.evil:80'
    for host in (*evil, '', '10.0.0.1'):
        assert ask(page, '/', Cookie=cookie, Host=host)[0] == 421, host
        assert ask(page, f'/?token={page.token}', Host=host)[0] == 421, host
    # A tunnel has another port.
    for host in ('localhost', 'localhost:8080', f'127.0.0.1:{port}', '[::1]:7'):
        assert ask(page, '/', Cookie=cookie, Host=host)[0] == 200, host


def test_it_listens_to_this_computer_only_and_ports_that_are_taken_are_said(page: Page) -> None:
    with closing(socket.socket()) as outside:
        outside.settimeout(5)
        # It is bound to one address, not to all.
        assert outside.connect_ex(('127.0.0.2', page.server_port)) != 0
    for port in (page.server_port, 99999):
        with pytest.raises(BadInput, match=f'Port {port} of this computer cannot be used'):
            Page(page.newest, port)


ASK = """
import os, socket, sys
from tests.support.told import Told
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
with socket.socket() as one:
    try:
        one.connect(('127.0.0.1', int(sys.argv[1])))
        one.sendall(b'GET / HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n')
        print(one.recv(12).decode())
    except ConnectionError:
        pass
"""


@pytest.mark.skipif(os.getuid() != 0, reason='only root can become another user')
def test_other_users_get_nothing_at_all(page: Page) -> None:
    words = [sys.executable, '-c', ASK, str(page.server_port)]
    said = [run_to_end([*words, *user]).stdout.strip() for user in ([], ['65534'])]
    assert said == ['HTTP/1.0 403', '']


@pytest.mark.parametrize('limit_s', [1.0, LIMIT_S])
def test_slow_ones_keep_nobody_out(
    page: Page, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """Each is ended after a time, the oldest when there are too many; the last is the owner's."""
    monkeypatch.setattr(web, 'REQUEST_S', limit_s)
    address = web.HOST, page.server_port
    slow = [
        socket.create_connection(address, LIMIT_S) for _ in range(web.MOST_CONNECTIONS + 8)
    ]  # fmt: skip
    for one in slow:
        with suppress(ConnectionError):
            one.sendall(b'GET / HTTP/1.1\r\nX: ')
            assert limit_s == LIMIT_S or one.recv(1) == b''
    assert ask(page, '/')[0] == 403
    if limit_s < LIMIT_S:
        wait_until(lambda: not page._open)
    for one in slow:
        one.close()


def test_the_page_follows_the_run(tmp_path: Path, browser: Browser) -> None:
    with (
        live_run(tmp_path) as ledger,
        served(tmp_path / 'ledger.journal') as page,
        tab(browser, page.address, PHONE) as seen,
    ):
        body, where = seen.page.locator('body'), f'http://127.0.0.1:{page.server_port}/'
        expect(body).to_contain_text('12.3k/20k')
        assert seen.page.url == where and page.token not in seen.page.evaluate('document.cookie')
        text = seen.text()
        assert all(word in text for word in (HOSTILE, 'run-1', 'b0', '137/s', 'starting'))
        assert seen.page.locator("svg[aria-label='loss of cnn over samples']").count() == 1

        # What happens next shows by itself; a loss that is no number breaks nothing.
        ledger.fragment_progress(
            'cnn', 1, at=time.time(), samples=15_000, rate=140.0, metrics={'loss': math.nan}
        )
        ledger.commit()
        expect(body).to_contain_text('15k/20k')
        ledger.over(HOSTILE, at=time.time(), state='failed', why=f'{HOSTILE} broke')
        ledger.end_run(at=time.time(), how='done')
        expect(body).to_contain_text(re.compile('ended: done'))
        assert HOSTILE + ' broke' in seen.text() and 'At present' not in seen.text()
        assert seen.page.locator('img, script').count() == 0
        assert seen.complaints == [] and seen.overflowing() == []
        assert seen.asked_for - {'data:,'} == {page.address, where}


def test_the_last_page_ends_damage_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('parsl_freetrain.cli.live.web.SHARE', 0)
    path = tmp_path / 'ledger.journal'
    with live_run(tmp_path) as ledger:
        live = LivePage(Journal(path), None, 0.0)
        assert live.newest()[1] == 1
        path.rename(tmp_path / 'away')
        text, again_s = live.newest()
        assert text.startswith('The ledger cannot be read now: ') and again_s == 5
        (tmp_path / 'away').rename(path)
        ledger.end_run(at=time.time(), how='done')
        text, again_s = live.newest()
        assert 'ended: done' in text and again_s is None
    path.unlink()
    assert live.newest() == (text, None)


def test_the_verb_prints_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_run(tmp_path):
        command = [*FREETRAIN, 'watch', '--web', '--json', '--ledger', tmp_path]
        with Program(command, stderr=subprocess.PIPE) as watching:
            address = urlsplit(json.loads(watching.said())['address'])
            with closing(http.client.HTTPConnection(address.netloc, timeout=LIMIT_S)) as connection:
                connection.request('GET', f'/?{address.query}')
                assert connection.getresponse().status == 303
            watching.send_signal(signal.SIGINT)
            said = watching.wait(LIMIT_S), watching.stdout.read(), watching.stderr.read()
            assert said == (0, '', '')
        ports = (['--port', '80'], 'says where --web'), (['--web', '--port', '99999'], '99999')
        for arguments, words in (*ports, (['--web', '--run', 'x'], "no run 'x'")):
            assert main(['watch', '--ledger', str(tmp_path), *arguments]) == 2
            out = capsys.readouterr()
            assert out.out == '' and len(out.err.splitlines()) == 1 and words in out.err
