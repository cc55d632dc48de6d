"""Draws how much later jobs start: ``python docs/delay_all.py FILE.jsonl PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot

RUNS = {
    'without': '#808080',
    'backfill': '#2166ac',
    'two runs': '#b2182b',
    'preemptible': '#4d9221',
}


def draw(lines: Path, picture: Path) -> None:
    """The share of jobs that start no later than by so many seconds, for each kind of run."""
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 4), layout='constrained')
    for name, color in RUNS.items():
        delays = sorted(each for said in found for each in said[name]['delays_s'])
        shares = [100 * (place + 1) / len(delays) for place in range(len(delays))]
        axes.step(delays, shares, where='post', color=color, label=f'{name}: {len(delays)} jobs')
    axes.set_xlabel('seconds later than in the latest of the runs without FreeTrain')
    axes.set_ylabel('jobs, %')
    axes.set_xscale('symlog', linthresh=10)
    axes.axvline(0, color='black', linewidth=0.5)
    axes.set_title(f'{len(found)} mixes of jobs', fontsize=10)
    axes.legend(loc='lower right')
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


if __name__ == '__main__':
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
