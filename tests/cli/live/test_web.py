"""``freetrain watch --web``: access to the page, and its contents in a real browser during a
run.
"""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from parsl_freetrain.cli.live import web
from parsl_freetrain.cli.live.cells import trainer_cells
from parsl_freetrain.cli.live.curves import LiveCurves
from parsl_freetrain.cli.live.run_status import RunStatus
from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.cli.live.web import Feed, Page
from parsl_freetrain.cli.main import main
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.writer import Ledger
from tests.support.browser import DESKTOP, PHONE, Browser
from tests.support.browser import browser as browser  # a fixture
from tests.support.ledgers import demo_ledger
from tests.support.waiting import LIMIT_S

HOSTILE = '<img src=x onerror="document.title=\'broken\'">'
CURVE = {'nodes': [1, 2], 'rate': [100.0, 200.0]}


@contextmanager
def live_run(folder: Path) -> Iterator[Ledger]:
    """The ledger of a run that goes on: one trainer with 2 nodes, one that waits, and
    two blocks.
    """
    now = time.time()
    ledger = Ledger(folder / 'ledger.sqlite')
    ledger.begin_run('run-1', at=now - 100, parsl_run_dir='', command='python x.py')
    ledger.nodes.offered([('n0', now - 100, None), ('n1', now - 100, None)])
    for name in ('cnn', HOSTILE):
        ledger.trainers.submitted(
            name=name,
            at=now - 100,
            spec={'min_nodes': 1, 'max_nodes': 2, 'curve': CURVE},
            total_samples=20_000,
            samples=0,
        )
    ledger.nodes.block_opened(
        'b0', at=now - 100, job_id='1', nodes=2, walltime_s=3600.0, names=['n0', 'n1']
    )
    for node in ('n0', 'n1'):
        ledger.nodes.joined(f'b0/{node}', at=now - 90, block='b0', name=node)
    ledger.nodes.block_opened('b1', at=now - 10, job_id='2', nodes=4, walltime_s=None, names=[])
    ledger.trainers.state('cnn', at=now - 90, state='running')
    ledger.trainers.fragment_decided(
        'cnn', 1, at=now - 90, task_id=1, nodes=('b0/n0', 'b0/n1'), deadline=None, from_samples=0
    )
    ledger.trainers.fragment_started('cnn', 1, at=now - 90, samples=0)
    ledger.trainers.fragment_progress(
        'cnn', 1, at=now, samples=12_345, rate=137.0, metrics={'loss': 0.25}
    )
    ledger.commit()
    try:
        yield ledger
    finally:
        ledger.close()


@contextmanager
def served(path: Path, every_s: float = 0.05) -> Iterator[Page]:
    with Reader(path) as reader:
        view, curves = LiveView(reader, DpAllocator()), LiveCurves(reader).document
        page = Page(Feed(view, str(path), every_s, curves=curves))
        try:
            yield page
        finally:
            page.close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with live_run(tmp_path), served(tmp_path / 'ledger.sqlite') as page:
        yield page


def ask(
    page: Page, path: str, method: str = 'GET', **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer; a Host header of None's place is the right one."""
    with closing(http.client.HTTPConnection(web.HOST, page.port, timeout=LIMIT_S)) as connection:
        connection.request(
            method, path, headers={name.replace('_', '-'): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def cookie_of(page: Page) -> str:
    status, headers, _ = ask(page, f'/?{urlsplit(page.address).query}')
    assert (status, headers['Location']) == (303, '/')
    return headers['Set-Cookie']


def test_only_who_has_the_token_gets_anything(page: Page) -> None:
    token = urlsplit(page.address).query.removeprefix('token=')
    assert len(token) >= 40
    cookie = cookie_of(page)
    assert 'HttpOnly' in cookie and 'SameSite' in cookie and token in cookie
    name = cookie.partition('=')[0]
    for path in ('/', '/page.js', '/style.css', '/events', '/absent'):
        for given in (
            '',
            f'{name}=',
            f'{name}={token[:-1]}',
            f'other={token}',
            f'{name}={token}x',
            '\xff;;=',
            f'{name}="',
        ):
            status, headers, text = ask(page, path, Cookie=given)
            assert status == 403 and token not in str(headers) + text and 'cnn' not in text
        assert ask(page, f'{path}?token={token[:-1]}')[0] == 403
        assert ask(page, f'{path}?token=%ff%fe')[0] == 403
    assert (
        ask(page, f'/events?token={token}')[0] == 403
    )  # only the first page takes it from the address
    for path, kind in (
        ('/', 'text/html'),
        ('/page.js', 'text/javascript'),
        ('/style.css', 'text/css'),
    ):
        status, headers, text = ask(page, path, Cookie=cookie)
        assert status == 200 and headers['Content-Type'].startswith(kind) and token not in text
        assert (
            "default-src 'none'" in headers['Content-Security-Policy']
            and headers['Cache-Control'] == 'no-store'
        )
    assert ask(page, '/../web.py', Cookie=cookie)[0] == 404
    assert ask(page, '/', 'POST', Cookie=cookie)[0] == 501


def test_a_name_that_is_not_this_computers_is_refused(page: Page) -> None:
    cookie = cookie_of(page)
    for host in (
        'evil.example',
        f'evil.example:{page.port}',
        '127.0.0.1.evil.example',
        '',
        'localhost.evil:80',
        '10.0.0.1',
    ):
        assert ask(page, '/', Cookie=cookie, Host=host)[0] == 421, host
        assert ask(page, f'/?{urlsplit(page.address).query}', Host=host)[0] == 421, host
    for host in (
        'localhost',
        'localhost:8080',
        f'127.0.0.1:{page.port}',
        '[::1]:7',
    ):  # a tunnel has another port
        assert ask(page, '/', Cookie=cookie, Host=host)[0] == 200, host


def test_it_listens_to_this_computer_only_and_ports_that_are_taken_are_said(
    page: Page, tmp_path: Path
) -> None:
    with closing(socket.socket()) as outside:
        outside.settimeout(5)
        assert outside.connect_ex(('127.0.0.2', page.port)) != 0  # bound to one address, not to all
    with Reader(tmp_path / 'ledger.sqlite') as reader:
        feed = Feed(LiveView(reader), '', 1.0)
        for port in (page.port, 99999):
            with pytest.raises(BadInput, match=f'Port {port} of this computer cannot be used'):
                Page(feed, port)


def test_idle_connections_do_not_keep_others_out_for_good(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web._Handler, 'timeout', 0.5)
    silent = [
        socket.create_connection((web.HOST, page.port), timeout=LIMIT_S)
        for _ in range(web.MOST_CONNECTIONS + 8)
    ]
    try:
        for one in silent:
            one.settimeout(LIMIT_S)
            assert one.recv(1) == b''  # none of them is kept: too many, or nothing asked
    finally:
        for one in silent:
            one.close()
    assert ask(page, '/')[0] == 403


def test_the_feed_reads_once_for_everybody(tmp_path: Path) -> None:
    now = time.time()
    with live_run(tmp_path), Reader(tmp_path / 'ledger.sqlite') as reader:
        times = iter([now, now + 0.5, now + 1.5])
        feed = Feed(LiveView(reader), 'x', 1.0, clock=lambda: next(times))
        first, second, third = feed.document(), feed.document(), feed.document()
    assert first is second and third is not second
    assert (first['state'], first['over'], first['heading'], first['ledger']) == (
        'running',
        False,
        'FreeTrain: run-1',
        'x',
    )


def test_a_page_that_closes_waits_for_the_reading_of_its_ledger(tmp_path: Path) -> None:
    """SQLite crashes the process if a connection is closed while it is read from."""
    reading, go_on = threading.Event(), threading.Event()

    class Slow(LiveView):
        def snapshot(self, now: float) -> RunStatus:
            reading.set()
            assert go_on.wait(LIMIT_S)
            return super().snapshot(now)

    with live_run(tmp_path), Reader(tmp_path / 'ledger.sqlite') as reader:
        feed = Feed(Slow(reader), 'x', 1.0)
        page = Page(feed)
        with closing(
            http.client.HTTPConnection(web.HOST, page.port, timeout=LIMIT_S)
        ) as connection:
            connection.request('GET', '/events', headers={'Cookie': cookie_of(page)})
            assert reading.wait(LIMIT_S)
            end = threading.Thread(target=page.close)
            end.start()
            end.join(1.0)
            assert end.is_alive()
            go_on.set()
            end.join()
            for read in (feed.document, feed.charts, feed.curves):
                with pytest.raises(FreeTrainError, match='not served any more'):
                    read()


def test_a_second_ctrl_c_while_a_page_closes_leaves_nobody_who_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_run(tmp_path), Reader(tmp_path / 'ledger.sqlite') as reader:
        feed = Feed(LiveView(reader), 'x', 1.0)
        page = Page(feed)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(page._server, 'shutdown', lambda: signal.raise_signal(signal.SIGINT))
            page.close()
        with pytest.raises(FreeTrainError, match='not served any more'):
            feed.document()
        page.close()


@pytest.mark.parametrize('size', [DESKTOP, PHONE], ids=['desktop', 'phone'])
@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
def test_the_page_follows_the_run(
    tmp_path: Path, browser: Browser, size: tuple[int, int], dark: bool
) -> None:
    with live_run(tmp_path) as ledger, served(tmp_path / 'ledger.sqlite') as page:
        tab = browser.page(page.address, size, dark)
        tab.wait(lambda: tab.look('document.querySelectorAll("[data-trainer]").length') == 2)
        assert 'token' not in tab.look('location.href') and page.address.split('=')[
            1
        ] not in tab.look('document.cookie')
        tab.wait(lambda: tab.look('document.querySelectorAll("#charts svg.plot").length') == 1)
        tab.wait(lambda: tab.look('document.querySelector("[data-metric=loss] svg") !== null'))
        # Each metric is drawn once.
        assert tab.look("document.querySelectorAll('svg[aria-label*=loss]').length") == 1
        assert tab.overflowing() == []
        tab.picture(tmp_path / 'page.png')
        text = tab.text()
        assert (
            HOSTILE in text
            and 'run-1' in text
            and 'b0' in text
            and '12.3k/20k' in text
            and '137/s' in text
        )
        with Reader(tmp_path / 'ledger.sqlite') as reader:
            [cnn, _] = LiveView(reader, DpAllocator()).snapshot(time.time()).trainers
        shown = tab.look(
            'Object.fromEntries([...document.querySelectorAll("[data-trainer=cnn] .figures div")]'
            '.map(d => [d.children[0].textContent, d.children[1].textContent]))'
        )
        same = {web.WORDS.get(key, key): value for key, value in trainer_cells(cnn).items()}
        for moving in ('done in', 'efficiency U'):
            del shown[moving], same[moving]
        assert shown == same
        assert tab.look('document.querySelector("[data-trainer=cnn] progress").value') == 12_345

        # What happens next shows by itself; a loss that is no number breaks nothing.
        ledger.trainers.fragment_progress(
            'cnn', 1, at=time.time(), samples=15_000, rate=140.0, metrics={'loss': math.nan}
        )
        ledger.commit()
        tab.wait(lambda: '15k/20k' in tab.text() and 'nan' in tab.text())
        ledger.trainers.state(HOSTILE, at=time.time(), state='failed', why=HOSTILE + ' broke')
        ledger.end_run('run-1', at=time.time(), how='done')
        tab.wait(lambda: tab.look('document.body.dataset.over') == 'yes')
        assert (
            'ended: done' in tab.text()
            and HOSTILE + ' broke' in tab.text()
            and 'No block is open' in tab.text()
        )
        assert tab.look('document.title') == 'FreeTrain: ended'
        assert tab.look('document.querySelectorAll("img").length') == 0
        assert tab.complaints() == [] and tab.overflowing() == []
        where = f'http://127.0.0.1:{page.port}/'
        assert tab.asked_for() == {
            page.address,
            where,
            where + 'page.js',
            where + 'style.css',
            where + 'events',
            where + 'curves',
        }
        tab.close()


def test_metrics_are_drawn_over_the_chosen_axis(tmp_path: Path, browser: Browser) -> None:
    demo_ledger(tmp_path / 'ledger.sqlite', runs=2, seconds=60.0)
    with served(tmp_path / 'ledger.sqlite') as page:
        tab = browser.page(page.address)
        tab.wait(lambda: tab.look('document.querySelectorAll("[data-metric] .line").length') > 1)
        lines = 'document.querySelectorAll("[data-metric=loss] .line").length'
        label = 'document.querySelector("[data-metric=loss] svg").getAttribute("aria-label")'
        assert (tab.look(lines), tab.look(label)) == (2, 'loss over samples')
        assert {'cnn', 'mlp'} <= set(
            tab.look('document.querySelector("#legend").innerText').split()
        )
        tab.look('place("axis").value = "seconds"; place("smooth").value = 0.9; showCurves()')
        assert (tab.look(lines), tab.look(label)) == (4, 'loss over seconds')
        assert tab.look('document.querySelectorAll("[data-metric=loss] .raw").length') == 2
        tab.picture(tmp_path / 'metrics.png')
        tab.look('place("axis").value = "epochs"; showCurves()')
        assert 'No trainer has a total in epochs' in tab.text()
        assert tab.complaints() == [] and tab.overflowing() == []
        tab.close()


def test_the_page_says_when_nobody_serves_it_any_more(tmp_path: Path, browser: Browser) -> None:
    with live_run(tmp_path), served(tmp_path / 'ledger.sqlite') as page:
        tab = browser.page(page.address)
        tab.wait(lambda: 'cnn' in tab.text())
    tab.wait(lambda: 'No connection to freetrain watch --web' in tab.text())
    assert 'cnn' in tab.text()
    tab.close()


def test_a_ledger_without_a_run_yet_gets_its_first_one(tmp_path: Path, browser: Browser) -> None:
    ledger = Ledger(tmp_path / 'ledger.sqlite')
    with served(tmp_path / 'ledger.sqlite') as page:
        tab = browser.page(page.address)
        tab.wait(lambda: 'no run yet' in tab.text())
        ledger.begin_run('first', at=time.time(), parsl_run_dir='', command='')
        ledger.commit()
        tab.wait(lambda: 'FreeTrain: first' in tab.text())
        tab.close()
    ledger.close()


def test_the_verb_prints_the_address_and_ends_with_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_run(tmp_path):
        command = [
            sys.executable,
            '-m',
            'parsl_freetrain.cli.main',
            'watch',
            '--web',
            '--ledger',
            str(tmp_path),
        ]
        with subprocess.Popen(
            [*command, '--json'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as watching:
            assert watching.stdout is not None and watching.stderr is not None
            address = urlsplit(json.loads(watching.stdout.readline())['address'])
            with closing(
                http.client.HTTPConnection(
                    address.hostname or '', address.port or 0, timeout=LIMIT_S
                )
            ) as connection:
                connection.request('GET', f'/?{address.query}')
                assert connection.getresponse().status == 303
            watching.send_signal(signal.SIGINT)
            assert (watching.wait(LIMIT_S), watching.stdout.read(), watching.stderr.read()) == (
                0,
                '',
                '',
            )
        for arguments, words in (
            (['--port', '80'], '--port says where --web'),
            (['--web', '--run', 'x'], "no run 'x'"),
            (['--web', '--port', '99999'], 'Port 99999'),
        ):
            assert main(['watch', '--ledger', str(tmp_path), *arguments]) == 2
            out = capsys.readouterr()
            assert out.out == '' and len(out.err.splitlines()) == 1 and words in out.err
