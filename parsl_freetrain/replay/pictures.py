"""Charts of a replay, and of a sweep: nodes over time, use of node-seconds, decisions, U."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.replay.result import WHERE_THEY_WENT, PoolResult, ReplayResult

with needs('A picture of a replay'):
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

TOL_MUTED = (
    *('#332288', '#CC6677', '#117733', '#DDCC77', '#88CCEE', '#882255', '#44AA99', '#999933'),
    '#AA4499',
)
"""A palette that colour-blind readers can distinguish."""

OFFERED = '#D9D9D9'
INK = '#222222'

COLOURS = dict(
    zip(
        WHERE_THEY_WENT,
        ('#009E73', '#E69F00', '#D55E00', '#F0E442', '#56B4E9', OFFERED, '#CC79A7', '#000000'),
        strict=True,
    )
)
"""By use of node-seconds."""
BINS = 1200
MOST_LANES = 36  # maximum number of bands; further trainers share the last one
Floats = npt.NDArray[np.float64]


def draw(result: ReplayResult, folder: Path) -> list[Path]:
    """Draw ``nodes.png``, ``node-seconds.png`` and ``decisions.png`` into an existing folder."""
    return [
        _nodes(result.trace, folder / 'nodes.png'),
        _node_seconds(result.trace, folder / 'node-seconds.png'),
        _decisions(result.trace, folder / 'decisions.png'),
    ]


def save(figure: Figure, path: Path) -> Path:
    for axes in figure.axes:
        axes.spines[['top', 'right']].set_visible(False)
        axes.tick_params(colors=INK)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
    return path


def _nodes(outcome: PoolResult, path: Path) -> Path:
    series = outcome.series
    # At most two bins for each step: more are of no use in a short trace.
    bins = min(BINS, max(60, 2 * len(series.times)))
    edges = np.linspace(outcome.start_s, outcome.end_s, bins + 1)
    idle = means(series.times[:-1], series.times[1:], series.idle[:-1].astype(float), edges)
    bands = [means(*band, edges) for band in lanes(outcome)]
    figure = Figure(figsize=(11, 4.5), layout='constrained')
    axes = figure.subplots()
    hours = edges / 3600
    axes.stairs(idle, hours, fill=True, color=OFFERED)
    below = np.zeros(len(edges) - 1)
    for i, band in enumerate(bands):
        color = TOL_MUTED[i % len(TOL_MUTED)]
        axes.stairs(below + band, hours, baseline=below, fill=True, color=color)
        below = below + band
    axes.set(xlim=(hours[0], hours[-1]), ylim=(0, None))
    axes.set(xlabel="hours of the trace's clock", ylabel='nodes')
    bands_of = f'used, one band for each of {len(bands)} trainers at a time'
    unused = Patch(color=OFFERED, label='idle, not used')
    handles = [unused, Patch(color=TOL_MUTED[0], label=bands_of)]
    axes.legend(handles=handles, loc='upper left', bbox_to_anchor=(0, 1.12), ncols=2, frameon=False)
    return save(figure, path)


def lanes(outcome: PoolResult) -> list[tuple[Floats, Floats, Floats]]:
    """Starts, ends and nodes of fragments by lane: each trainer's, reused when it has ended."""
    series = outcome.series
    trainers = pd.Series(series.span_trainer, dtype=object)
    starts = pd.Series(series.span_start).groupby(trainers, sort=False)
    first: dict[Any, float] = starts.min().to_dict()
    last: dict[Any, float] = pd.Series(series.span_end).groupby(trainers).max().to_dict()
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lane: dict[str, int] = {}
    used = 0
    for name in sorted(first, key=lambda name: first[name]):
        while busy and busy[0][0] <= first[name]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        lane[name] = heapq.heappop(free)
        heapq.heappush(busy, (last[name], lane[name]))
    lanes_of = [min(lane[name], MOST_LANES - 1) for name in series.span_trainer]
    of_span = np.array(lanes_of, dtype=np.int64)
    return [
        (series.span_start[here], series.span_end[here], series.span_nodes[here].astype(np.float64))
        for here in (of_span == i for i in range(min(used, MOST_LANES)))
    ]


def means(starts: Floats, ends: Floats, height: Floats, edges: Floats) -> Floats:
    """The exact mean of a sum of boxes (its integral is linear) between neighbouring edges."""
    at = np.concatenate([starts, ends])
    order = np.argsort(at, kind='stable')
    at, step = at[order], np.concatenate([height, -height])[order]
    if not len(at):
        return np.zeros(len(edges) - 1)
    total = np.concatenate([[0.0], np.cumsum(np.cumsum(step)[:-1] * np.diff(at))])
    found: Floats = np.diff(np.interp(edges, at, total)) / np.diff(edges)
    return found


def _node_seconds(outcome: PoolResult, path: Path) -> Path:
    figure = Figure(figsize=(8, 3.4), layout='constrained')
    axes = figure.subplots()
    there = [key for key in WHERE_THEY_WENT if outcome.node_s[key]]
    hours = [outcome.node_s[key] / 3600 for key in there]
    axes.barh(range(len(there)), hours, color=[COLOURS[key] for key in there])
    axes.set_yticks(range(len(there)), [WHERE_THEY_WENT[key] for key in there])
    for i, found in enumerate(hours):
        share, place = f'{100 * found * 3600 / outcome.idle_node_s:.1f} %', (max(found, 0), i)
        axes.annotate(share, place, (4, 0), textcoords='offset points', va='center')
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel('idle node-hours')
    return save(figure, path)


def _decisions(outcome: PoolResult, path: Path) -> Path:
    took = outcome.series.decision_s * 1000
    figure = Figure(figsize=(10, 3.8), layout='constrained')
    left, right = figure.subplots(1, 2, sharey=True)
    if len(took):
        # There is a decision for every instant except the end of the window.
        idle = outcome.series.idle[: len(took)]
        left.plot(idle, took, '.', markersize=3, alpha=0.4, color='#0072B2')
        right.plot(np.linspace(0, 100, len(took)), np.sort(took), color='#0072B2')
        for share in (50, 99):
            at = float(np.percentile(took, share))
            text = f'{share} %: {at:.2f} ms'
            right.annotate(text, (share, at), (-6, 4), textcoords='offset points', ha='right')
            right.plot([share], [at], 'o', color=INK, markersize=4)
        left.set_yscale('log')
    left.set(xlabel='idle nodes', ylabel='ms for a decision')
    right.set(xlabel='% of decisions that took no longer')
    return save(figure, path)


MOST_LINES = 12  # maximum number of lines that the legend names
WIDE = 20.0  # numbers that differ by more than this factor are drawn on a logarithmic axis


def draw_sweep(table: pd.DataFrame, swept: Sequence[str], folder: Path) -> list[Path]:
    """Draw a sweep's ``table`` into a folder, by the columns ``swept``; returns the files."""
    numeric, boolean = pd.api.types.is_numeric_dtype, pd.api.types.is_bool_dtype
    numbers = [name for name in swept if numeric(table[name]) and not boolean(table[name])]
    drawn = []
    for name in numbers:
        others = [other for other in swept if other != name]
        file = folder / f'efficiency-{name.replace("_", "-")}.png'
        drawn.append(_efficiency(table, name, others, file))
    waits, took = folder / 'node-seconds.png', folder / 'decisions.png'
    return [*drawn, _node_seconds_of(table, swept, waits), _decisions_of(table, swept, took)]


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
    return save(figure, path)


def _node_seconds_of(table: pd.DataFrame, swept: Sequence[str], path: Path) -> Path:
    figure = Figure(figsize=(10, 1.6 + 0.3 * len(table)), layout='constrained')
    axes = figure.subplots()
    left = np.zeros(len(table))
    for key, why in WHERE_THEY_WENT.items():
        share = 100 * (table[f'node_s_{key}'] / table['idle_node_s']).to_numpy(dtype=float)
        if share.any():
            axes.barh(range(len(table)), share, left=left, color=COLOURS[key], label=why)
            left += share
    _name_rows(axes, table, swept)
    axes.set(xlabel='% of idle node-seconds', xlim=(0, 100))
    figure.legend(*axes.get_legend_handles_labels(), loc='outside right center', frameon=False)
    return save(figure, path)


def _decisions_of(table: pd.DataFrame, swept: Sequence[str], path: Path) -> Path:
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(table)), layout='constrained')
    axes = figure.subplots()
    marks = ('p50', 'median', 'o'), ('p99', '99 %', 'D'), ('max', 'longest', '|')
    for which, label, mark in marks:
        found = table[f'decision_ms_{which}']
        axes.plot(found, range(len(table)), mark, color='#0072B2', label=label)
    axes.set_xscale('log')
    _name_rows(axes, table, swept)
    axes.set_xlabel('ms for a decision')
    axes.grid(axis='x', alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside right center', frameon=False)
    return save(figure, path)


def _name_rows(axes: Axes, table: pd.DataFrame, swept: Sequence[str]) -> None:
    rows = table[list(swept)].itertuples(index=False)
    labels = [', '.join(map(_text, row)) for row in rows]
    axes.set_yticks(range(len(table)), labels)
    axes.set_ylabel(', '.join(name.replace('_', ' ') for name in swept))
    axes.invert_yaxis()


def _text(value: object) -> str:
    return format(value, 'g') if isinstance(value, float) else str(value)
