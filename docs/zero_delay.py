"""Draws two runs of the same jobs, one above the other: ``python docs/zero_delay.py FILE.json
PICTURE.png``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot


def draw(every: dict[str, Any], picture: Path) -> None:
    """Draw the first mix in each mode: ordinary jobs in grey with their numbers, blocks in light
    blue, what was trained in dark blue.
    """
    first = next(iter(every)).partition(', ')[2]
    found = {name: said for name, said in every.items() if name.partition(', ')[2] == first}
    figure, axes = pyplot.subplots(
        2 * len(found), 1, figsize=(9, 3.4 * len(found)), layout='constrained'
    )
    for row, (mix, said) in enumerate(found.items()):
        end = max(job['end_s'] for kind in ('alone', 'filled') for job in said[kind]['ordinary'])
        for place, kind in enumerate(('alone', 'filled')):
            axis = axes[2 * row + place]
            nodes(axis, said[kind], end)
            axis.set_title(
                f'{mix}: '
                + (
                    'without FreeTrain'
                    if kind == 'alone'
                    else f'with it, {100 * said["share"]:.0f} % of the idle node-seconds trained'
                ),
                fontsize=9,
            )
    axes[-1].set_xlabel('seconds since the first submission')
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def nodes(axis: Any, outcome: dict[str, Any], end: float) -> None:
    names = [f'node{number:02d}' for number in range(1, outcome['nodes'] + 1)]
    for block in outcome['blocks']:
        for name in block['names']:
            axis.barh(
                names.index(name),
                block['end_s'] - block['start_s'],
                left=block['start_s'],
                color='#a6c8e4',
                height=0.8,
            )
    for name, start, stop in outcome['trained']:
        axis.barh(names.index(name), stop - start, left=start, color='#2166ac', height=0.5)
    for number, job in enumerate(outcome['ordinary'], 1):
        for name in job['names']:
            axis.barh(
                names.index(name),
                job['end_s'] - job['start_s'],
                left=job['start_s'],
                color='#b0b0b0',
                edgecolor='white',
                height=0.9,
            )
            axis.text(
                (job['start_s'] + job['end_s']) / 2,
                names.index(name),
                str(number),
                ha='center',
                va='center',
                fontsize=8,
            )
    axis.set(
        xlim=(0, end), ylim=(len(names) - 0.4, -0.6), yticks=range(len(names)), yticklabels=names
    )


if __name__ == '__main__':
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
