"""Draws the slots of GPipe, 1F1B and Chimera, one below the other: ``python
docs/pipeline_schedules.py PICTURE.png``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from parsl_freetrain.training.parallel.pipeline.schedule import FORWARD, METHODS, PipelineSchedule
from workflows.pipeline_facts import activations

STAGES, MICRO_BATCHES = 4, 8
COLORS = {('F', 0): '#a6cee3', ('B', 0): '#1f78b4', ('F', 1): '#fdbf6f', ('B', 1): '#d96c06'}
NAMES = {'gpipe': 'GPipe', '1f1b': '1F1B', 'chimera': 'Chimera'}


def draw(picture: Path) -> None:
    """A box for each pass with its micro-batch; forward light, backward dark, the second direction
    in orange.
    """
    schedules = [make(STAGES, MICRO_BATCHES) for make in METHODS.values()]
    figure = Figure(figsize=(9, 1.9 * len(schedules)), layout='constrained')
    for axis, schedule in zip(
        figure.subplots(len(schedules), 1, sharex=True), schedules, strict=True
    ):
        rows(axis, schedule)
        axis.set_title(
            f'{NAMES[schedule.name]}: {schedule.slots} slots; activations of at most '
            f'{", ".join(map(str, activations(schedule)))} micro-batches',
            fontsize=9,
        )
    axis.set_xlabel('slot')
    figure.savefig(picture, dpi=110)


def rows(axis: Any, schedule: PipelineSchedule) -> None:
    for worker, row in enumerate(schedule.rows):
        for slot, task in enumerate(row):
            if task is not None:
                axis.barh(
                    worker,
                    1,
                    left=slot,
                    height=0.9,
                    color=COLORS[task.kind, task.direction],
                    edgecolor='white',
                )
                axis.text(
                    slot + 0.5,
                    worker,
                    str(task.micro_batch),
                    ha='center',
                    va='center',
                    fontsize=7,
                    color='black' if task.kind == FORWARD else 'white',
                )
    axis.set(
        ylim=(schedule.stages - 0.5, -0.5),
        yticks=range(schedule.stages),
        yticklabels=[f'worker {w}' for w in range(schedule.stages)],
    )


if __name__ == '__main__':
    draw(Path(sys.argv[1]))
