"""Draws the pictures of the demonstration anew: status, live page, report, nodes over time::

python docs/demo_pictures.py OUT [DEMO_ARGS]

runs ``make demo`` with the output folder OUT (five minutes) and photographs it in Chromium.
"""

from __future__ import annotations

import html
import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

STATIC = Path(__file__).resolve().parent / '_static'
FREETRAIN = Path(sys.executable).with_name('freetrain')
CHROMIUM = '/usr/bin/chromium'
WIDTH = 1000
# What a terminal of 110 columns shows, as white on black.
TERMINAL = (
    '<pre style="margin:0;padding:16px;font:14px/16px monospace;color:#eee;background:#1e2022">'
)
COMMAND = 'python -m workflows.digits'
COSTS = 'What changes of nodes cost: assumed and measured'
PART_DONE = 0.6


def freetrain(*words: str) -> str:
    done = subprocess.run(
        [FREETRAIN, *words], capture_output=True, text=True, env={'COLUMNS': '110'}
    )
    return done.stdout


def keep(picture: bytes, name: str) -> None:
    found = Image.open(io.BytesIO(picture)).convert('RGB')
    found.quantize(256).save(STATIC / name, optimize=True)


def until_part_done(ledger: str, demo: subprocess.Popen[bytes]) -> None:
    while True:
        said = freetrain('status', '--ledger', ledger, '--json')
        trainers = json.loads(said)['trainers'] if said else []
        if any(t['samples'] > PART_DONE * (t['total'] or math.inf) for t in trainers):
            return
        if demo.poll() is not None:
            raise SystemExit('The demonstration ended before its pictures were made.')
        time.sleep(1)


def photograph_status(page: Page, ledger: str) -> None:
    said = '$ freetrain status\n' + freetrain('status', '--ledger', ledger)
    page.set_content(f'<body style="margin:0">{TERMINAL}{html.escape(said.rstrip())}</pre>')
    keep(page.screenshot(full_page=True), 'status.png')


def photograph_live(page: Page, ledger: str) -> None:
    served = subprocess.Popen(
        [FREETRAIN, 'watch', '--web', '--json', '--ledger', ledger], stdout=subprocess.PIPE
    )
    try:
        assert served.stdout is not None
        page.goto(json.loads(served.stdout.readline())['address'])
        photograph_part(page, 'live.png', None, 'Loss and speed, trainer by trainer')
    finally:
        served.terminate()
        served.wait()


def photograph_part(page: Page, name: str, after: str | None, before: str) -> None:
    """The report between two headings, or from its beginning; without this computer's folders."""

    def top(heading: str) -> float:
        box = page.get_by_role('heading', name=heading, exact=True).bounding_box()
        assert box is not None
        return box['y']

    page.locator('code').evaluate_all(f"all => all.map(e => e.textContent = '{COMMAND}')")
    begin = 0 if after is None else top(after) + 24
    cut = {'x': 0, 'y': begin, 'width': WIDTH, 'height': top(before) - 10 - begin}
    keep(page.screenshot(full_page=True, clip=cut), name)


def main(out: str, *more: str) -> None:
    ledger = str(Path(out) / 'holes')
    demo = subprocess.Popen([sys.executable, '-m', 'workflows.digits', '--out', out, *more])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': WIDTH, 'height': 200})
        until_part_done(ledger, demo)
        photograph_status(page, ledger)
        photograph_live(page, ledger)
        if demo.wait():
            raise SystemExit('The demonstration failed.')
        page.goto((Path(out) / 'report.html').resolve().as_uri())
        photograph_part(page, 'report.png', None, COSTS)
        photograph_part(page, 'nodes.png', 'Nodes over time', 'Trainers')
        browser.close()


if __name__ == '__main__':
    main(*sys.argv[1:])
