"""Draws the pictures of the documentation anew, from what was measured::

python docs/pictures.py

Status, live page and report are photographs of a run: docs/demo_pictures.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import hole_to_fragment  # noqa: E402
import pipeline_schedules  # noqa: E402
import two_schedulers  # noqa: E402
import zero_delay  # noqa: E402

from tests.benchmarks.versus.tables import columns_of, picture  # noqa: E402
from workflows import chimera_gpt, cosmoflow, ffn, unet3d  # noqa: E402

STATIC = DOCS / '_static'


def main() -> None:
    def measured(name: str) -> dict[str, object]:
        found: dict[str, object] = json.loads((DOCS / f'{name}.json').read_text())
        return found

    hole_to_fragment.draw(STATIC / 'hole-to-fragment.png')
    pipeline_schedules.draw(STATIC / 'pipeline-schedules.png')
    found = json.loads((DOCS / 'two-schedulers.json').read_text())
    two_schedulers.draw(found, STATIC / 'two-schedulers.png')
    zero_delay.draw(measured('zero-delay'), STATIC / 'zero-delay.png')
    picture(columns_of(measured('versus')), STATIC / 'versus.png')
    for workflow in (chimera_gpt, cosmoflow, ffn, unet3d):
        name = workflow.__name__.rpartition('.')[2]
        workflow.draw(measured(name), STATIC / f'{name}.png')


if __name__ == '__main__':
    main()
