"""The picture of a run: nodes over time, coloured by trainer, with kills and checkpoints marked."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.intervals import Interval, clip, levels
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import ProgressRow, Story
from parsl_freetrain.ledger.timeline import by_fragment, left_at, natural_order, offered, phases, struck_nodes

OKABE_ITO = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00')
TOL_MUTED = ('#332288', '#CC6677', '#117733', '#DDCC77', '#88CCEE', '#882255', '#44AA99', '#999933', '#AA4499')
"""Palettes that stay apart for colour-blind readers: for up to 6, and for more."""

OFFERED = '#D9D9D9'
INK = '#222222'
MOST_NAMED = 12
"""So many trainers have a line in the legend."""

Box = tuple[float, float, float, float]


def draw(
    reader: Reader, path: str | os.PathLike[str], *, title: str = '', run: str | None = None, now: float | None = None
) -> Path:
    """Draw one run or all, one behind the other, as a PNG (or whatever the ending of ``path`` says).

    Parameters
    ----------
    path
        The file to write; its folder exists.
    run, now
        As in :func:`parsl_freetrain.ledger.summary.node_seconds`.

    Returns
    -------
    pathlib.Path
        ``path``.
    """
    story = reader.story(run)
    clock = Clock(story, now)
    names = sorted({o.name for o in story.offers} | {n.name for n in story.nodes}, key=natural_order)
    trainers = list(dict.fromkeys(t.name for t in story.trainers))
    palette = OKABE_ITO if len(trainers) <= len(OKABE_ITO) else TOL_MUTED
    colours = {name: palette[i % len(palette)] for i, name in enumerate(trainers)}

    rows_in = min(9.0, max(1.6, 0.26 * len(names)))
    figure = Figure(figsize=(12.0, rows_in + 4.4), layout='constrained')
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=[rows_in, 1.5, 1.5])
    _draw_nodes(top, story, clock, names, colours)
    _draw_counts(middle, story, clock, trainers, colours)
    _draw_samples(bottom, story, reader.progress(run), clock, trainers, colours)
    for axes in (top, middle, bottom):
        axes.spines[['top', 'right']].set_visible(False)
        for moment in clock.joints:
            axes.axvline(moment, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    for moment in clock.joints:
        top.annotate(
            'resumed',
            (moment, 1.0),
            xycoords=('data', 'axes fraction'),
            xytext=(3, 2),
            textcoords='offset points',
            fontsize=8,
            color=INK,
        )
    bottom.set_xlabel('seconds since the start' + (', runs one behind the other' if clock.joints else ''))
    bottom.set_xlim(0.0, clock.length or 1.0)
    figure.align_ylabels()
    figure.legend(handles=_legend(trainers, colours), loc='outside right upper', frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=12, x=0.01, ha='left')
    figure.savefig(path, dpi=130)
    return Path(path)


def _draw_nodes(axes: Axes, story: Story, clock: Clock, names: list[str], colours: dict[str, str]) -> None:
    row = {name: i for i, name in enumerate(names)}
    boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
    ticks: list[tuple[float, int]] = []
    blocks = {(b.run, b.block): b for b in story.blocks}
    nodes = {(n.run, n.node): n for n in story.nodes}
    written = by_fragment(story.checkpoints)
    runs = {r.id: r for r in story.runs}

    def add(kind: tuple[str, str], run: int, name: str, times: Sequence[Interval], half: float) -> None:
        for start, end in times:
            boxes[kind].append((clock.of(run, start), clock.of(run, end), row[name] - half, row[name] + half))

    for run in story.runs:
        for name, times in offered(story, run, clock.until[run.id]).items():
            add(('', 'offered'), run.id, name, times, 0.46)
    for fragment in story.fragments:
        if fragment.trainer not in colours:
            continue
        saved = written.get(fragment.key, [])
        until = clock.until[fragment.run]
        parts = phases(fragment, saved, until=until, alive=story.alive(runs[fragment.run]))
        for one in fragment.nodes:
            place = nodes.get((fragment.run, one))
            if place is None:
                continue
            here = (place.joined_at, left_at(place, blocks, until))
            for kind, times in parts.items():
                kind = 'trained' if kind == 'checkpointing' else kind
                add((fragment.trainer, kind), fragment.run, place.name, clip(times, *here), 0.36)
            ticks.extend((clock.of(fragment.run, c.at), row[place.name]) for c in saved if here[0] <= c.at <= here[1])

    for (trainer, kind), found in sorted(boxes.items(), key=lambda item: item[0][0] != ''):
        colour = colours.get(trainer, OFFERED)
        style = _style(kind, colour)
        axes.add_collection(PolyCollection([_corners(b) for b in found], **style))  # type: ignore[arg-type]
    marks = [[(x, y - 0.4), (x, y - 0.04)] for x, y in ticks]
    # Empty artists confuse the layout.
    if marks:
        axes.add_collection(LineCollection(marks, colors='white', linewidths=2.4))
        axes.add_collection(LineCollection(marks, colors=INK, linewidths=1.0))
    _draw_kills(axes, story, clock, row)
    every = max(1, math.ceil(len(names) / 40))
    axes.set_yticks(range(0, len(names), every), [_short(n) for n in names[::every]], fontsize=8)
    axes.tick_params(axis='y', length=0)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axes.set_ylabel('node')


def _draw_kills(axes: Axes, story: Story, clock: Clock, row: dict[str, int]) -> None:
    struck = struck_nodes(story)
    if not struck:
        return
    blocks = {(b.run, b.block): b for b in story.blocks}
    times = [clock.of(n.run, left_at(n, blocks, clock.until[n.run])) for n in struck]
    size, width = (7.0, 1.8) if len(row) <= 24 else (4.0, 1.2)
    axes.plot(
        times,
        [row[n.name] for n in struck],
        linestyle='none',
        marker='x',
        color=INK,
        markersize=size,
        markeredgewidth=width,
        clip_on=False,
        zorder=5,
    )


def _draw_counts(axes: Axes, story: Story, clock: Clock, trainers: list[str], colours: dict[str, str]) -> None:
    steps: dict[str, list[tuple[float, int]]] = {name: [] for name in trainers}
    room: list[tuple[float, int]] = []
    for run in story.runs:
        for times in offered(story, run, clock.until[run.id]).values():
            for start, end in times:
                room += [(clock.of(run.id, start), 1), (clock.of(run.id, end), -1)]
    for fragment in story.fragments:
        if fragment.trainer in steps:
            end = clock.until[fragment.run] if fragment.ended_at is None else fragment.ended_at
            count = len(fragment.nodes)
            steps[fragment.trainer] += [
                (clock.of(fragment.run, fragment.decided_at), count),
                (clock.of(fragment.run, end), -count),
            ]
    grid = sorted({0.0, clock.length} | {x for found in (room, *steps.values()) for x, _ in found})
    heights = [levels(steps[name], grid) for name in trainers]
    most = levels(room, grid)
    axes.fill_between(grid, most, step='post', color=OFFERED, linewidth=0)
    floor = [0] * len(grid)
    for name, level in zip(trainers, heights, strict=True):
        ceiling = [a + b for a, b in zip(floor, level, strict=True)]
        axes.fill_between(grid, floor, ceiling, step='post', color=colours[name], linewidth=0)
        floor = ceiling
    axes.set_ylim(0, max([1, *most, *floor]) * 1.05)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylabel('nodes')


def _draw_samples(
    axes: Axes, story: Story, progress: list[ProgressRow], clock: Clock, trainers: list[str], colours: dict[str, str]
) -> None:
    seen: dict[tuple[int, str, int], list[tuple[float, int]]] = defaultdict(list)
    for report in progress:
        seen[report.run, report.trainer, report.fragment].append((report.at, report.samples))
    totals = {t.name: t.total_samples for t in story.trainers}
    for name in trainers:
        mine = [f for f in story.fragments if f.trainer == name]
        furthest = max([f.reached or f.seen_samples or f.from_samples for f in mine], default=0)
        whole = totals[name] or furthest or 1
        line: list[tuple[float, float]] = []
        for fragment in mine:
            points = [(fragment.decided_at, fragment.from_samples)]
            if fragment.started_at is not None:
                points.append((fragment.started_at, fragment.from_samples))
            points += seen[fragment.key]
            if fragment.ended_at is not None and fragment.reached is not None and fragment.samples is not None:
                points += [(fragment.ended_at, fragment.reached), (fragment.ended_at, fragment.samples)]
            line += [(clock.of(fragment.run, at), samples / whole) for at, samples in points]
        if line:
            line.append((clock.length, line[-1][1]))
        axes.plot([x for x, _ in line], [y for _, y in line], color=colours[name], linewidth=1.6)
    axes.set_ylim(-0.02, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    axes.grid(axis='y', color='#EEEEEE', linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel('samples')


def _legend(trainers: list[str], colours: dict[str, str]) -> list[Artist]:
    handles: list[Artist] = [Patch(color=colours[name], label=_short(name)) for name in trainers[:MOST_NAMED]]
    if len(trainers) > MOST_NAMED:
        handles.append(Patch(alpha=0.0, label=f'and {len(trainers) - MOST_NAMED} more'))
    sample = colours[trainers[0]] if trainers else INK
    handles.append(Patch(color=OFFERED, label='offered, idle'))
    handles.append(Patch(label='starting', **_style('starting', sample)))  # type: ignore[arg-type]
    handles.append(Patch(label='lost', **_style('lost', sample)))  # type: ignore[arg-type]
    handles.append(Line2D([], [], color=INK, marker='|', linestyle='none', markersize=8, label='checkpoint'))
    handles.append(Line2D([], [], color=INK, marker='x', linestyle='none', markeredgewidth=1.8, label='killed'))
    return handles


def _style(kind: str, colour: str) -> dict[str, object]:
    if kind == 'starting':
        return {'facecolor': _tint(colour, 0.55), 'edgecolor': 'none', 'linewidth': 0}
    if kind == 'lost':
        return {'facecolor': 'white', 'edgecolor': colour, 'hatch': '/////', 'linewidth': 0.6}
    return {'facecolor': colour, 'edgecolor': 'none', 'linewidth': 0}


def _tint(colour: str, white: float) -> tuple[float, float, float]:
    red, green, blue = (c + (1.0 - c) * white for c in to_rgb(colour))
    return red, green, blue


def _corners(box: Box) -> list[tuple[float, float]]:
    left, right, low, high = box
    return [(left, low), (right, low), (right, high), (left, high)]


def _short(name: str, most: int = 22) -> str:
    # A dollar sign would start a formula.
    return (name if len(name) <= most else name[: most - 1] + '…').replace('$', r'\$')
