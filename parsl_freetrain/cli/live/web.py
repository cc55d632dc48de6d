"""``freetrain watch --web``: the live view as a page for a browser on this computer.

Login nodes are shared, so the page is served to this computer only (or through a tunnel), and only
to browsers with the token of the printed address. Requests with a foreign Host header are refused
(DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from parsl_freetrain.cli.live.cells import block_cells, heading_words, trainer_cells
from parsl_freetrain.cli.live.page_charts import charts
from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.report.document import resource

HOST = '127.0.0.1'
NAMES = frozenset({'127.0.0.1', 'localhost', '[::1]'})
"""Host names accepted from a browser. The port is not checked, since a tunnel changes it."""

MOST_CONNECTIONS = 32
PATIENCE_S = 10.0
"""Timeout in seconds for a client that does not read or send."""

CHARTS_EVERY_S = 10.0
"""Seconds between two drawings of the charts."""

QUIET_S = 15.0
"""Seconds without news after which a comment is sent, to detect clients that have gone."""

HEADERS = {
    'Content-Security-Policy': "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Cross-Origin-Opener-Policy': 'same-origin',
}
FILES = {
    '/': ('web.html', 'text/html'),
    '/page.js': ('web.js', 'text/javascript'),
    '/style.css': ('style.css', 'text/css'),
}
OVER = ('ended', 'died')
WORDS = {'U': 'efficiency U', 'frag': 'fragments', 'pre': 'preempted', 'resc': 'rescaled'}
"""Longer titles of columns, for which a terminal has no room."""


class Feed:
    """The newest figures for all pages, read from the ledger at most once in a fixed number of
    seconds, and not after :meth:`close`.
    """

    def __init__(
        self,
        view: LiveView,
        ledger: str,
        every_s: float,
        clock: Callable[[], float] = time.time,
        curves: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.every_s = every_s
        self._curves = curves
        self._view = view
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._read_at = -float('inf')
        self._document: dict[str, Any] = {}
        self._drawn_at = -float('inf')
        self._charts = ''

    def close(self) -> None:
        """Read the ledger no more. A reading that goes on is waited for: SQLite crashes if its
        connection is closed meanwhile.
        """
        self._closed = True
        with self._lock:
            pass

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise FreeTrainError('this page is not served any more')
            yield

    def document(self) -> dict[str, Any]:
        """The newest :func:`page_document`."""
        with self._reading():
            now = self._clock()
            if abs(now - self._read_at) >= self.every_s:
                self._document = page_document(self._view, self._ledger, now)
                self._read_at = now
            return self._document

    def charts(self) -> str:
        """The newest charts, as HTML."""
        with self._reading():
            now = self._clock()
            over = bool(self._document) and self._document['over']
            if over or abs(now - self._drawn_at) >= CHARTS_EVERY_S:
                self._charts, self._drawn_at = charts(self._view, now), now
            return self._charts

    def curves(self) -> dict[str, Any]:
        """The metrics, as of :class:`~parsl_freetrain.cli.live.curves.LiveCurves`."""
        with self._reading():
            return self._curves()


def page_document(view: LiveView, ledger: str, now: float) -> dict[str, Any]:
    """The data of the page: texts as in ``freetrain status``, and numbers for bars; ``now`` in
    epoch seconds.
    """
    seen = view.snapshot(now)
    return {
        'ledger': ledger,
        'heading': f'FreeTrain: {seen.run or "no run yet"}',
        'about': heading_words(seen).replace('  ', ', '),
        'state': seen.life.state,
        'note': seen.life.sentence,
        'over': bool(seen.run) and seen.life.state in OVER,
        'trainers': [
            {
                'name': t.name,
                'state': t.state,
                'why': t.why,
                'samples': t.samples,
                'total': t.total,
                'shown': {WORDS.get(key, key): value for key, value in trainer_cells(t).items()},
            }
            for t in seen.trainers
        ],
        'blocks': [block_cells(block) for block in seen.blocks],
    }


@dataclass
class _Site:
    """The shared data of all connections of a server."""

    feed: Feed
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    cookie: str = field(
        default_factory=lambda: f'freetrain-{secrets.token_hex(4)}'
    )  # its own name, since browsers share cookies between ports
    closing: threading.Event = field(default_factory=threading.Event)


class Page:
    """An HTTP server of the page, from its creation until ``close``.

    Parameters
    ----------
    feed
        The source of the figures.
    port
        The port to listen on; 0: any free port.

    Raises
    ------
    BadInput
        The port is taken or not permitted.
    """

    def __init__(self, feed: Feed, port: int = 0) -> None:
        self._site = _Site(feed)
        site = self._site

        class Handler(_Handler):
            about = site

        try:
            self._server = _Server((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise BadInput(
                f'Port {port} of this computer cannot be used ({error}); give another '
                'one with --port, or 0 for any.'
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name='FreeTrain-Web', daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address for a browser; anybody who has it can see the figures."""
        return f'http://{HOST}:{self.port}/?token={self._site.token}'

    def close(self) -> None:
        """End all connections and stop listening."""
        self._site.closing.set()
        # Connections end by themselves, some later than this. First, since another Ctrl-C may
        # interrupt the rest.
        self._site.feed.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    about: _Site
    timeout = PATIENCE_S
    server_version = 'FreeTrain'
    sys_version = ''

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        if self.headers.get('Host', '').rsplit(':', 1)[0] not in NAMES:
            self._answer(421, 'This computer is not known by that name here.')
        elif self._matches(parse_qs(where.query).get('token', [''])[0]) and where.path == '/':
            # Redirect to an address without the token, to keep it out of the browser's history.
            cookie = f'{self.about.cookie}={self.about.token}; HttpOnly; SameSite=Lax; Path=/'
            self._answer(303, '', {'Location': '/', 'Set-Cookie': cookie})
        elif not self._matches(self._cookie()):
            self._answer(
                403, 'Open the address, with its token, that freetrain watch --web has printed.'
            )
        elif where.path == '/events':
            self._events()
        elif where.path == '/curves':
            self._answer(*self._metrics())
        elif where.path in FILES:
            name, kind = FILES[where.path]
            self._answer(200, resource(name), {'Content-Type': f'{kind}; charset=utf-8'})
        else:
            self._answer(404, 'There is no such page.')

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to the user's terminal."""

    def _matches(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.about.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get('Cookie', '')).get(self.about.cookie)
        except CookieError:
            return ''
        return found.value if found else ''

    def _answer(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self._headers(
            {
                'Content-Type': 'text/plain; charset=utf-8',
                **(headers or {}),
                'Content-Length': str(len(body)),
            }
        )
        self.wfile.write(body)

    def _headers(self, headers: Mapping[str, str]) -> None:
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self) -> None:
        self.send_response(200)
        self._headers({'Content-Type': 'text/event-stream'})
        last, drawn, quiet_since, over = '', '', time.monotonic(), False
        try:
            while not over and not self.about.closing.is_set():
                kind, text = self._news()
                if text != last:
                    self.wfile.write(f'{kind}data: {text}\n\n'.encode())
                    last, quiet_since = text, time.monotonic()
                elif time.monotonic() - quiet_since > QUIET_S:
                    self.wfile.write(b': still here\n\n')
                    quiet_since = time.monotonic()
                over = not kind and json.loads(text)['over']
                if not kind and (picture := self.about.feed.charts()) != drawn:
                    self.wfile.write(f'event: charts\ndata: {json.dumps(picture)}\n\n'.encode())
                    drawn = picture
                self.about.closing.wait(0 if over else self.about.feed.every_s)
            if over:
                self.wfile.write(b'event: over\ndata: {}\n\n')
        except OSError:
            return  # the page was closed

    def _metrics(self) -> tuple[int, str, dict[str, str]]:
        kind = {'Content-Type': 'application/json; charset=utf-8'}
        try:
            return 200, json.dumps(self.about.feed.curves()), kind
        except (BadInput, OSError, sqlite3.Error) as error:
            return 503, json.dumps(f'The ledger cannot be read now: {error}'), kind

    def _news(self) -> tuple[str, str]:
        try:
            return '', json.dumps(self.about.feed.document())
        except (BadInput, OSError, sqlite3.Error) as error:
            return 'event: problem\n', json.dumps(f'The ledger cannot be read now: {error}')
