"""Takes the pictures of docs/report.md during and after a run of the demonstration::

python -m tests.docs.screenshots docs/_static
"""

import html
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.cli.live.web import LivePage
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.journal.read import Journal
from tests.support.browser import launched, tab
from tests.support.programs import run_to_end

SIZE = (1000, 760)
PART = 0.5
"""Part of the total that each trainer has when the run's pictures are taken."""

BEFORE = """(() => {{
  document.querySelector('code').parentElement.remove();  // paths of this computer
  const from = [...document.querySelectorAll('h2')].find(h => h.textContent.startsWith('{}'));
  while (from.nextSibling) from.nextSibling.remove();
  from.remove();
}})()"""
BEFORE_THE_COSTS, BEFORE_THE_CARDS = BEFORE.format('What'), BEFORE.format('Loss and speed')
"""Leave the first part of the page."""

ONLY_THE_NODES = """(() => {
  const all = [...document.querySelectorAll('h2')];
  const from = all.find(h => h.textContent.startsWith('Nodes over'));
  while (from.previousSibling) from.previousSibling.remove();
  let to = from.nextElementSibling;
  while (to.tagName !== 'H2') to = to.nextElementSibling;
  while (to.nextSibling) to.nextSibling.remove();
  to.remove();
  from.remove();
  document.body.style.margin = '8px';
})()"""
"""For README.md."""

TERMINAL = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1d1f21; color: #e8e8e8; }}
pre {{ margin: 0; padding: 16px; font: 14px 'DejaVu Sans Mono', monospace; }}
</style><pre>$ freetrain status
{}</pre>"""


def main(out: Path) -> None:
    """Run the demonstration and write status.png, live.png and report.png to a folder."""
    with tempfile.TemporaryDirectory() as name, launched(Path(name) / 'browser') as browser:
        folder = Path(name)
        demo = subprocess.Popen(
            [sys.executable, '-m', 'workflows.digits', '--epochs', '60', '--out', f'{folder}/run'],
            stdout=subprocess.DEVNULL,
        )
        try:
            during(browser, demo, folder, out)
            if demo.wait():
                sys.exit(f'The demonstration ended with status {demo.returncode}.')
            report = folder / 'run' / 'report.html'
            picture(browser, report, out / 'report.png', SIZE, BEFORE_THE_COSTS)
            picture(browser, report, out / 'nodes.png', (1000, 300), ONLY_THE_NODES)
        finally:
            demo.kill()


def picture(
    browser: Browser, html: Path, out: Path, size: tuple[int, int], script: str = 'null'
) -> None:
    """The whole page, after a script has changed it, with few colours."""
    with tab(browser, html.as_uri(), size) as seen:
        seen.page.evaluate(script)
        seen.page.screenshot(path=out, full_page=True)
    Image.open(out).convert('RGB').quantize(48).save(out, optimize=True)


def during(browser: Browser, demo: subprocess.Popen[bytes], folder: Path, out: Path) -> None:
    """Take the pictures of status and of the live page when the training is half done."""
    ledger = folder / 'run' / 'holes' / 'ledger.journal'
    while not ledger.exists() and demo.poll() is None:
        time.sleep(0.2)
    journal = Journal(ledger)
    view = LiveView(journal, DpAllocator())
    while demo.poll() is None:
        trainers = view.snapshot(time.time()).trainers
        if trainers and all(t.total and t.samples > PART * t.total for t in trainers):
            break
        time.sleep(0.2)
    command = [sys.executable, '-m', 'parsl_freetrain.cli.main', 'status', '--ledger', str(ledger)]
    said = run_to_end(command, env={'COLUMNS': '110', 'PATH': ''}).stdout
    (folder / 'live.html').write_text(LivePage(journal, None, 1.0).newest()[0])
    picture(browser, folder / 'live.html', out / 'live.png', SIZE, BEFORE_THE_CARDS)
    (folder / 'status.html').write_text(TERMINAL.format(html.escape(said)))
    picture(browser, folder / 'status.html', out / 'status.png', (940, 190))


if __name__ == '__main__':
    main(Path(sys.argv[1]))
