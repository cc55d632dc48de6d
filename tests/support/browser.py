"""A real browser for tests: headless Chromium, controlled over a pipe with the DevTools protocol.

``make system-packages`` installs it, and it is started once for each test session. Protocol:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import LIMIT_S

PROGRAMS = ('chromium-headless-shell', 'chromium', 'chromium-browser', 'google-chrome')

# Chromium reads from 3 and writes to 4; both pipes are moved out of the way first. Chromium
# outlives the first test that needs it and starts children at any time, so it must not be a
# descendant of the tests. When the tests end, its pipe closes, and it exits.
LAUNCH = """import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 5) for fd in sys.argv[1:3])
if child := os.fork():
    print(child)
    sys.stdout.flush()
    os._exit(0)
os.setsid()
os.dup2(reading, 3)
os.dup2(writing, 4)
os.close(reading)
os.close(writing)
os.dup2(2, 1)
os.execv(sys.argv[3], sys.argv[3:])
"""

DESKTOP, PHONE = (1280, 900), (390, 844)
OVERFLOWING = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = e => getComputedStyle(e).overflowX === 'auto';
  const cut = e => e.parentElement && (scrolls(e.parentElement) || cut(e.parentElement));
  return [...document.body.querySelectorAll('*')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && (box.right > wide + 1 || box.left < -1) && !cut(e);
  }).map(e =>
    e.tagName + '.' + (e.className.baseVal ?? e.className) + ' ' + e.textContent.slice(0, 40));
})()"""


class Browser:
    """One running browser; ``page`` opens a tab."""

    def __init__(self, program: str, folder: Path) -> None:
        ours_out, self._out = os.pipe()
        self._in, ours_in = os.pipe()
        # As root it needs --no-sandbox, which is safe with our own pages. It must not carry the
        # mark of a test's own processes.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith('FREETRAIN_TEST')
        }
        launched = subprocess.run(
            [
                sys.executable,
                '-IS',
                '-c',
                LAUNCH,
                str(ours_out),
                str(ours_in),
                program,
                '--headless',
                '--no-sandbox',
                '--disable-gpu',
                '--remote-debugging-pipe',
                f'--user-data-dir={folder}',
                '--disable-dev-shm-usage',
                '--no-first-run',
                '--hide-scrollbars',
                'about:blank',
            ],
            pass_fds=(ours_out, ours_in),
            env={**kept, 'HOME': str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )
        self._process = psutil.Process(int(launched.stdout))
        os.close(ours_out)
        os.close(ours_in)
        self._buffer = b''
        self._count = 0
        self.heard: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result; other messages are kept in ``heard``."""
        self._count += 1
        number = self._count
        message = {
            'id': number,
            'method': method,
            'params': parameters,
            **({'sessionId': session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b'\0')
        end = time.monotonic() + LIMIT_S
        while True:
            answer = self.hear(end)
            if answer.get('id') == number:
                assert 'error' not in answer, f'{method}: {answer["error"]}'
                return dict(answer['result'])
            self.heard.append(answer)

    def hear(self, end: float) -> dict[str, Any]:
        """The next message of any kind."""
        while b'\0' not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, 'the browser does not answer'
            more = os.read(self._in, 1 << 20)
            assert more, 'the browser is gone'
            self._buffer += more
        first, _, self._buffer = self._buffer.partition(b'\0')
        return dict(json.loads(first))

    def page(self, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> Page:
        """A new tab with its own profile that has loaded this address."""
        return Page(self, url, size, dark)

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError, psutil.Error):
            self.ask('Browser.close')
            end = time.monotonic() + LIMIT_S
            # It is not our child, so possibly no process reaps it.
            while self._process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
                time.sleep(0.02)
        # Kill the rest of its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._in)
        os.close(self._out)


class Page:
    """A tab: its contents, its errors and its requests."""

    def __init__(self, browser: Browser, url: str, size: tuple[int, int], dark: bool) -> None:
        self._browser = browser
        self._profile = browser.ask('Target.createBrowserContext')['browserContextId']
        target = browser.ask(
            'Target.createTarget', url='about:blank', browserContextId=self._profile
        )['targetId']
        self._session = browser.ask('Target.attachToTarget', targetId=target, flatten=True)[
            'sessionId'
        ]
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')
        self.ask(
            'Emulation.setDeviceMetricsOverride',
            width=size[0],
            height=size[1],
            deviceScaleFactor=1,
            mobile=size[0] < 600,
        )
        self.ask(
            'Emulation.setEmulatedMedia',
            features=[{'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}],
        )
        went = self.ask('Page.navigate', url=url)
        assert not went.get('errorText'), went['errorText']
        self.wait(
            lambda: self.look(
                'document.readyState === "complete" && location.href !== "about:blank"'
            )
        )

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def look(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.ask(
            'Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True
        )
        assert 'exceptionDetails' not in answer, answer['exceptionDetails']
        return answer['result'].get('value')

    def wait(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, self.look('document.body.innerText')
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.look('document.body.innerText'))

    def overflowing(self) -> list[str]:
        """Elements that are wider than the page, except in boxes that scroll."""
        found: list[str] = self.look(OVERFLOWING)
        wider = self.look(
            'document.documentElement.scrollWidth - document.documentElement.clientWidth'
        )
        return [*found, *([f'the page is {wider} pixels too wide'] if wider > 0 else [])]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, the page's policy and the network, and uncaught
        exceptions.
        """
        said = []
        for heard in self._mine():
            method, what = heard['method'], heard['params']
            if method == 'Runtime.exceptionThrown':
                said.append(str(what['exceptionDetails']))
            elif method == 'Runtime.consoleAPICalled' and what['type'] in (
                'error',
                'warning',
                'assert',
            ):
                said.append(str(what['args']))
            elif method == 'Log.entryAdded' and what['entry']['level'] in ('error', 'warning'):
                said.append(what['entry']['text'])
        return said

    def asked_for(self) -> set[str]:
        """Addresses that the page has requested, including its own, without data: addresses."""
        return {
            h['params']['request']['url']
            for h in self._mine()
            if h['method'] == 'Network.requestWillBeSent'
            and not h['params']['request']['url'].startswith('data:')
        }

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        path.write_bytes(
            base64.b64decode(self.ask('Page.captureScreenshot', captureBeyondViewport=True)['data'])
        )

    def close(self) -> None:
        self._browser.ask('Target.disposeBrowserContext', browserContextId=self._profile)
        self._browser.heard[:] = [
            h for h in self._browser.heard if h.get('sessionId') != self._session
        ]

    def _mine(self) -> list[dict[str, Any]]:
        self.look('1')  # pending messages arrive before the answer
        return [h for h in self._browser.heard if h.get('sessionId') == self._session]


def program() -> str:
    """The browser's program; skips the test if there is none."""
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    return found or pytest.skip('needs a browser, which make system-packages installs')


@pytest.fixture(scope='session')
def browser() -> Iterator[Browser]:
    """The session's browser."""
    folder = Path(tempfile.mkdtemp(prefix='ft-browser-', dir='/tmp'))
    running = Browser(program(), folder)
    try:
        running.ask('Browser.getVersion')
        yield running
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)
