"""A real browser, driven by Playwright: Debian's Chromium, from `make system-packages`."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.support.waiting import LIMIT_S

expect.set_options(timeout=1000 * LIMIT_S)

PROGRAM = '/usr/bin/chromium'
# As root it needs --no-sandbox, which is safe with our own pages.
ARGUMENTS = [
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-sync',
    '--disable-breakpad',
]
DESKTOP, PHONE = (1280, 900), (390, 844)
OVERFLOWING = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = e => getComputedStyle(e).overflowX === 'auto';
  const cut = e => e.parentElement && (scrolls(e.parentElement) || cut(e.parentElement));
  const found = [...document.body.querySelectorAll('*')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && (box.right > wide + 1 || box.left < -1) && !cut(e);
  }).map(e => e.tagName + ' ' + e.textContent.slice(0, 40));
  return document.documentElement.scrollWidth > wide ? [...found, 'the page is too wide'] : found;
})()"""


class Tab:
    """A tab with a profile of its own, and what it has complained of and asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked_for: set[str] = set()
        page.on('console', self._said)
        page.on('pageerror', lambda error: self.complaints.append(str(error)))
        page.on('request', lambda request: self.asked_for.add(request.url))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ('error', 'warning'):
            self.complaints.append(message.text)

    def text(self) -> str:
        return self.page.inner_text('body')

    def overflowing(self) -> list[str]:
        """Elements that are wider than the page, except in boxes that scroll."""
        found: list[str] = self.page.evaluate(OVERFLOWING)
        return found


@contextmanager
def tab(
    browser: Browser, url: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False
) -> Iterator[Tab]:
    """A new tab that has loaded this address."""
    context = browser.new_context(
        viewport={'width': size[0], 'height': size[1]},
        color_scheme='dark' if dark else 'light',
        is_mobile=size[0] < 600,
    )
    found = Tab(context.new_page())
    found.page.goto(url)
    yield found
    context.close()


@contextmanager
def launched(folder: Path) -> Iterator[Browser]:
    """The browser, which keeps what it writes in this folder."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=PROGRAM, args=ARGUMENTS, env={**os.environ, 'HOME': str(folder)}
        )
        yield running
        running.close()


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if shutil.which(PROGRAM) is None:
        pytest.skip(f'needs a browser, {PROGRAM}: make system-packages')
    with launched(tmp_path_factory.mktemp('browser')) as running:
        yield running
