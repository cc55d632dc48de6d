"""Draws the pieces of one training on the nodes of two schedulers, from the records of a run::

python -m pytest tests/pbs/test_with_slurm.py --basetemp RUN
python docs/two_schedulers.py RUN/*0/slurm/ledger.journal RUN/*0/pbs/ledger.journal
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
COLOURS = '#0072b2', '#d55e00', '#009e73', '#cc79a7'


def pieces(ledger: Path) -> list[dict[str, Any]]:
    """Of each fragment: its node, replica, samples at its begin, and times in seconds."""
    sys.path.insert(0, str(DOCS.parent))
    from parsl_freetrain.journal.read import Journal

    history = Journal(ledger).history()
    scheduler, names = ledger.parent.name, {one.node: one.name for one in history.nodes}
    return [
        {
            'node': f'{scheduler} {names[node]}',
            'replica': int(one.trainer.partition('.replica')[2] or 0),
            'samples': one.launched.samples,
            'begin': round(one.launched.at, 2),
            'end': round(one.ended.at, 2),
        }
        for one in history.fragments
        for node in one.nodes
        if one.ended is not None
    ]


def draw(measured: list[dict[str, Any]], picture: Path) -> None:
    """A row for each node, a bar for each fragment, in the colour of its replica."""
    since = min(one['begin'] for one in measured)
    nodes = sorted({one['node'] for one in measured}, reverse=True)
    figure = Figure(figsize=(9, 0.6 + 0.5 * len(nodes)), layout='constrained')
    axis = figure.subplots()
    for one in measured:
        row, begin = nodes.index(one['node']), one['begin'] - since
        span = begin, one['end'] - one['begin']
        axis.broken_barh([span], (row + 0.1, 0.8), color=COLOURS[one['replica']], edgecolor='white')
    for replica, colour in enumerate(COLOURS):
        axis.plot([], [], color=colour, linewidth=6, label=f'replica {replica}')
    axis.set(yticks=[row + 0.5 for row in range(len(nodes))], xlabel='seconds', xlim=(0, None))
    axis.set_yticklabels(nodes)
    axis.legend(ncols=4, loc='lower center', bbox_to_anchor=(0.5, 1.0), frameon=False)
    axis.spines[['top', 'right']].set_visible(False)
    figure.savefig(picture, dpi=110)


if __name__ == '__main__':
    found = [one for ledger in sys.argv[1:] for one in pieces(Path(ledger))]
    (DOCS / 'two-schedulers.json').write_text(json.dumps(found) + '\n')
    draw(found, DOCS / '_static' / 'two-schedulers.png')
