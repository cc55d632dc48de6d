"""Draws how a hole becomes a fragment: ``python docs/hole_to_fragment.py PICTURE.png``."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

# First node, number of nodes, begin and end in minutes, colour, text.
BOXES = (
    (0, 2, 0, 10, '#c9ced6', 'job A'),
    (2, 2, 0, 2, '#c9ced6', 'job B'),
    (2, 2, 8, 10, '#c9ced6', 'job C'),
    (2, 2, 2, 2.6, '#a6d0ee', ''),
    (2, 2, 2.6, 5.4, '#0072b2', 'fragment 1\non 2 nodes'),
    (3, 1, 5.4, 5.7, '#a6d0ee', ''),
    (3, 1, 5.7, 7.7, '#0072b2', 'fragment 2\non 1 node'),
)
NOTES = (
    (2.3, 4.3, 'starts'),
    (5.4, 4.3, 'a node is lost: goes\non with the state\nthat the other has'),
    (7.8, 4.3, 'job C waits:\ncheckpoint,\nnodes given back'),
)


def draw(picture: Path) -> None:
    """Four nodes over time: jobs grey, the hole dashed, starts pale blue, training blue."""
    figure = Figure(figsize=(9, 2.9), layout='constrained')
    axis = figure.subplots()
    for first, nodes, begin, end, colour, text in BOXES:
        axis.broken_barh([(begin, end - begin)], (first + 0.04, nodes - 0.08), color=colour)
        white = 'white' if colour == '#0072b2' else 'black'
        axis.text((begin + end) / 2, first + nodes / 2, text, ha='center', va='center', color=white)
    axis.plot([2, 8, 8, 2, 2], [2, 2, 4, 4, 2], '--', color='#d55e00', linewidth=1.5)
    axis.text(6.6, 2.45, 'hole: 2 nodes, 6 minutes', ha='center', color='#d55e00')
    axis.plot([5.4], [2.5], 'x', color='#c0392b', markersize=10, markeredgewidth=3)
    for at, height, text in NOTES:
        axis.annotate(text, (at, 4), (at, height), ha='center', va='bottom', fontsize=9,
                      arrowprops={'arrowstyle': '-'})  # fmt: skip
    axis.set(xlim=(0, 10), ylim=(0, 5.6), yticks=[0.5, 1.5, 2.5, 3.5], xlabel='minutes')
    axis.set_yticklabels([f'node {number}' for number in range(4)])
    axis.spines[['top', 'right']].set_visible(False)
    figure.savefig(picture, dpi=110)


if __name__ == '__main__':
    draw(Path(sys.argv[1]))
