"""Takes the pictures of docs/report.md during and after a run of the demonstration::

python -m tests.docs.screenshots docs/_static
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from PIL import Image

from parsl_freetrain.cli.live.curves import LiveCurves
from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.cli.live.web import Feed
from parsl_freetrain.cli.live.web import Page as LivePage
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.ledger.reader import Reader
from tests.support.browser import Browser, program
from tests.support.programs import run_to_end

SIZE = (1000, 760)
PART = 0.5
"""Part of the total that each trainer has when the run's pictures are taken."""

BEFORE_THE_COSTS = """(() => {
  document.querySelector('code').parentElement.remove();  // paths of this computer
  const from = [...document.querySelectorAll('h2')].find(h => h.textContent.startsWith('What'));
  while (from.nextSibling) from.nextSibling.remove();
  from.remove();
})()"""
"""Leaves the first half of the report."""

TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1d1f21; color: #e8e8e8; }}
pre {{ margin: 0; padding: 16px; font: 14px 'DejaVu Sans Mono', monospace; }}
</style><pre>$ freetrain status
{}</pre>"""


def main(out: Path) -> None:
    """Run the demonstration and write status.png, live.png and report.png to a folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = Browser(program(), folder / 'browser')
        demo = subprocess.Popen(
            [sys.executable, '-m', 'workflows.digits', '--epochs', '60', '--out', f'{folder}/run'],
            stdout=subprocess.DEVNULL,
        )
        try:
            during(browser, demo, folder, out)
            if demo.wait():
                sys.exit(f'The demonstration ended with status {demo.returncode}.')
            report = folder / 'run' / 'report.html'
            tab = browser.page(report.as_uri(), SIZE)
            tab.look(BEFORE_THE_COSTS)
            tab.picture(out / 'report.png')
            for picture in ('status', 'live', 'report'):
                file = out / f'{picture}.png'
                Image.open(file).convert('RGB').quantize(48).save(file, optimize=True)
        finally:
            demo.kill()
            browser.close()


def during(browser: Browser, demo: subprocess.Popen[bytes], folder: Path, out: Path) -> None:
    """Take the pictures of status and of the live page when the training is half done."""
    ledger = folder / 'run' / 'holes' / 'ledger.sqlite'
    while not ledger.exists() and demo.poll() is None:
        time.sleep(0.2)
    with Reader(ledger) as reader:
        view = LiveView(reader, DpAllocator())
        while demo.poll() is None:
            trainers = view.snapshot(time.time()).trainers
            if trainers and all(t.total and t.samples > PART * t.total for t in trainers):
                break
            time.sleep(0.2)
        said = run_to_end(
            [sys.executable, '-m', 'parsl_freetrain.cli.main', 'status', '--ledger', str(ledger)],
            env={'COLUMNS': '110', 'PATH': ''},
            check=True,
        ).stdout
        curves = LiveCurves(reader).document
        page = LivePage(Feed(view, 'checkpoints/ledger.sqlite', 1.0, curves=curves))
        try:
            tab = browser.page(page.address, SIZE)
            for part in ('#charts', '#metrics'):
                tab.wait(partial(tab.look, f'document.querySelector("{part} svg") !== null'))
            tab.picture(out / 'live.png')
        finally:
            page.close()
    (folder / 'status.html').write_text(TERMINAL.format(html.escape(said)))
    browser.page((folder / 'status.html').as_uri(), (940, 190)).picture(out / 'status.png')


if __name__ == '__main__':
    main(Path(sys.argv[1]))
