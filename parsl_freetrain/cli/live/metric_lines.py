"""Metrics over time as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from parsl_freetrain.core.model.errors import clean

WIDTH = 24
MOST_LINES = 16
BARS = '▁▂▃▄▅▆▇█'


def metric_table(curves: Mapping[str, Mapping[str, Sequence[Any]]]) -> Table:
    """One line for each metric and trainer of a ``metrics_document``: its course and last value."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style='dim')
    for title in ('metric', 'trainer', 'over samples', 'now', 'smallest', 'largest'):
        left = title in ('metric', 'trainer', 'over samples')
        table.add_column(title, justify='left' if left else 'right', no_wrap=True)
    rows = [(metric, name, points) for metric, of in curves.items() for name, points in of.items()]
    for metric, name, points in rows[:MOST_LINES]:
        values = [value for *_, value in points]
        table.add_row(
            Text(clean(metric), overflow='ellipsis'),
            Text(clean(name), overflow='ellipsis'),
            sparkline([(samples, value) for samples, *_, value in points]),
            *(f'{value:.4g}' for value in (values[-1], min(values), max(values))),
        )
    if len(rows) > MOST_LINES:
        table.add_row(f'and {len(rows) - MOST_LINES} more', '', 'freetrain report')
    return table


def sparkline(points: Sequence[tuple[float, float]]) -> str:
    """The values over equal parts of the way from 0 to the last point, each the last one there."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    line = ['…'] * WIDTH
    for x, value in points:
        part = min(WIDTH - 1, int(WIDTH * x / (points[-1][0] or 1)))
        level = (value - low) / (high - low) if high > low else 0.5
        line[part] = BARS[min(len(BARS) - 1, int(len(BARS) * level))]
    for i in range(1, WIDTH):
        if line[i] == '…':
            line[i] = line[i - 1]
    return ''.join(line).replace('…', ' ')
