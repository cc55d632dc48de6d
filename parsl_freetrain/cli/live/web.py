"""A server of one page, for processes here of this user and root that have the token."""

import hmac
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.figures import Figures
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.runs import chosen

SHARE = 10  # of the time, at most one part in so many goes into writing the page


class LivePage:
    """The newest page about a run, rewritten every ``every_s`` seconds or less often."""

    def __init__(self, journal: Journal, run: str | None, every_s: float) -> None:
        self._journal, self._run, self._every_s = journal, run, every_s
        self._lock = threading.Lock()
        self._next, self._text, self._over = -math.inf, '', False
        self._write()

    def newest(self) -> tuple[str, int | None]:
        """The page, or why there is none; and seconds until the next one (None: no other)."""
        with self._lock:
            if not self._over and time.monotonic() >= self._next:
                try:
                    self._write()
                except (BadInput, OSError) as error:
                    return escape(f'The ledger cannot be read now: {error}'), 5
            wait_s = max(1, math.ceil(self._next - time.monotonic()))
            return self._text, None if self._over else wait_s

    def _write(self) -> None:
        begun = time.monotonic()
        history = self._journal.history()
        name = chosen(history, self._journal.path, self._run).name
        found = Figures(history.of(name), time.time(), DpAllocator())
        self._text, self._over = report_page(found), found.status.life.state in ('ended', 'died')
        self._next = begun + max(self._every_s, SHARE * (time.monotonic() - begun))


HOST = '127.0.0.1'
NAMES = {'127.0.0.1', 'localhost', '[::1]'}  # from any port, since a tunnel changes it
MOST_CONNECTIONS = 16  # at once; beyond that, the oldest is ended
REQUEST_S = 30.0  # for a whole request and its answer
HEADERS = {
    'Content-Type': 'text/plain; charset=utf-8',
    'Content-Security-Policy': "frame-ancestors 'none'",  # the page has the rest in itself
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Cross-Origin-Opener-Policy': 'same-origin',
}


class Page(ThreadingHTTPServer):
    """A page at :attr:`address`; ``newest`` says when a browser is to ask again (None: never)."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, newest: Callable[[], tuple[str, int | None]], port: int = 0) -> None:
        self.newest = newest
        self.token = secrets.token_urlsafe(32)
        # A name of its own, since browsers share cookies between ports.
        self.cookie = f'freetrain-{secrets.token_hex(4)}'
        self._open = list[socket.socket]()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise BadInput(
                f'Port {port} of this computer cannot be used ({error}); give another '
                'one with --port, or 0 for any.'
            ) from error
        self.address = f'http://{HOST}:{self.server_port}/?token={self.token}'
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections end by themselves."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if user_of(client_address) not in (0, os.getuid()):
            self.shutdown_request(request)
            return
        late = threading.Timer(REQUEST_S, _end, (request,))
        late.start()
        self._open.append(request)
        for oldest in self._open[:-MOST_CONNECTIONS]:
            _end(oldest)
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._open.remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def user_of(peer: tuple[str, int]) -> int:
    """The user whose process has the other end of a connection of this computer; -1: unknown."""
    [address] = struct.unpack('=I', socket.inet_aton(peer[0]))
    for line in Path('/proc/net/tcp').read_text().splitlines():
        _, local, _, _, _, _, _, user, *_ = line.split()
        if local == f'{address:08X}:{peer[1]:04X}':
            return int(user)
    return -1


class _Handler(BaseHTTPRequestHandler):
    server: Page
    server_version, sys_version = 'FreeTrain', ''

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        token = parse_qs(where.query).get('token')
        given = token[0] if token else self._cookie()
        if self.headers.get('Host', '').rsplit(':', 1)[0] not in NAMES:
            self._answer(421, 'This computer is not known by that name here.')
        elif not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(403, 'Open the address, with its token, that was printed.')
        elif where.path != '/':
            self._answer(404, 'There is no such page.')
        elif token:
            # Redirect to an address without the token, to keep it out of the browser's history.
            cookie = f'{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Lax; Path=/'
            self._answer(303, '', {'Location': '/', 'Set-Cookie': cookie})
        else:
            page, wait_s = self.server.newest()
            refresh = {} if wait_s is None else {'Refresh': str(wait_s)}
            self._answer(200, page, {'Content-Type': 'text/html; charset=utf-8', **refresh})

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to the user's terminal."""

    def _cookie(self) -> str:
        with suppress(CookieError):
            found = SimpleCookie(self.headers.get('Cookie', '')).get(self.server.cookie)
            return found.value if found else ''
        return ''

    def _answer(self, status: int, text: str, headers: Mapping[str, str] = HEADERS) -> None:
        body = text.encode(errors='replace')
        self.send_response(status)
        for name, value in {**HEADERS, **headers, 'Content-Length': str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
