"""Charts of a sweep: U against each swept number, use of node-seconds, duration of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.replay.pictures import COLOURS, TOL_MUTED, plain, save
from parsl_freetrain.replay.result import WHERE_THEY_WENT

with needs('A picture of a sweep'):
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 12  # maximum number of lines that the legend names
WIDE = 20.0  # numbers that differ by more than this factor are drawn on a logarithmic axis


def draw(table: pd.DataFrame, swept: Sequence[str], folder: Path) -> list[Path]:
    """Draw into an existing folder: ``efficiency-NAME.png`` for each swept number,
    ``node-seconds.png``, ``decisions.png``. ``table``: from :func:`~.sweep.sweep`; ``swept``: the
    columns that identify its rows. Returns the files.
    """
    numeric, boolean = pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype
    numbers = [name for name in swept if numeric(table[name]) and not boolean(table[name])]
    drawn = []
    for name in numbers:
        others = [other for other in swept if other != name]
        file = folder / f'efficiency-{name.replace("_", "-")}.png'
        drawn.append(_efficiency(table, name, others, file))
    waits, took = folder / 'node-seconds.png', folder / 'decisions.png'
    return [*drawn, _node_seconds(table, swept, waits), _decisions(table, swept, took)]


def _efficiency(table: pd.DataFrame, name: str, others: Sequence[str], path: Path) -> Path:
    figure = Figure(figsize=(7, 4.2), layout='constrained')
    axes = figure.subplots()
    lines = [*table.groupby(list(others), dropna=False, sort=False)] if others else [((), table)]
    for i, (values, rows) in enumerate(lines):
        in_order = rows.sort_values(name)
        label = ', '.join(
            f'{other.replace("_", " ")} {_text(value)}'
            for other, value in zip(others, values, strict=True)
        )
        style: Any = {'markersize': 4, 'color': TOL_MUTED[i % len(TOL_MUTED)]}
        style['label'] = label if others and i < MOST_LINES else None
        axes.plot(in_order[name], in_order['efficiency'].astype(float), 'o-', **style)
    least, most = float(table[name].min()), float(table[name].max())
    if least > 0 and most > WIDE * least:
        axes.set_xscale('log')
        ticks = sorted(set(table[name]))
        axes.set_xticks(ticks, list(map(_text, ticks)), minor=False)
        axes.minorticks_off()
    axes.set(xlabel=name.replace('_', ' '), ylabel='efficiency U')
    axes.grid(alpha=0.3)
    if others:
        axes.legend(frameon=False)
    plain(axes)
    return save(figure, path)


def _node_seconds(table: pd.DataFrame, swept: Sequence[str], path: Path) -> Path:
    figure = Figure(figsize=(10, 1.6 + 0.3 * len(table)), layout='constrained')
    axes = figure.subplots()
    left = np.zeros(len(table))
    for key, why in WHERE_THEY_WENT.items():
        share = (
            100
            * table[f'node_s_{key}'].to_numpy(dtype=float)
            / table['idle_node_s'].to_numpy(dtype=float)
        )
        if share.any():
            axes.barh(range(len(table)), share, left=left, color=COLOURS[key], label=why)
            left += share
    _name_rows(axes, table, swept)
    axes.set(xlabel='% of idle node-seconds', xlim=(0, 100))
    figure.legend(*axes.get_legend_handles_labels(), loc='outside right center', frameon=False)
    plain(axes)
    return save(figure, path)


def _decisions(table: pd.DataFrame, swept: Sequence[str], path: Path) -> Path:
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(table)), layout='constrained')
    axes = figure.subplots()
    marks = ('p50', 'median', 'o'), ('p99', '99 %', 'D'), ('max', 'longest', '|')
    for which, label, mark in marks:
        axes.plot(
            table[f'decision_ms_{which}'], range(len(table)), mark, color='#0072B2', label=label
        )
    axes.set_xscale('log')
    _name_rows(axes, table, swept)
    axes.set_xlabel('ms for a decision')
    axes.grid(axis='x', alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside right center', frameon=False)
    plain(axes)
    return save(figure, path)


def _name_rows(axes: Axes, table: pd.DataFrame, swept: Sequence[str]) -> None:
    rows = table[list(swept)].itertuples(index=False)
    labels = [', '.join(map(_text, row)) for row in rows]
    axes.set_yticks(range(len(table)), labels)
    axes.set_ylabel(', '.join(name.replace('_', ' ') for name in swept))
    axes.invert_yaxis()


def _text(value: object) -> str:
    return format(value, 'g') if isinstance(value, float) else str(value)
