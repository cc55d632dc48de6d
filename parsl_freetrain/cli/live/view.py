"""The live view of a run, read from its ledger: in the run's own terminal or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.model.errors import clean, nodes_text
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report import cells as texts
from parsl_freetrain.report import status
from parsl_freetrain.report.summary import CachedAllocator

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


MOST_BLOCKS = 12  # maximum number of open blocks to list; the others are counted
STATE_STYLES = {'running': 'green', 'finished': 'bold green', 'failed': 'bold red'}
STATE_STYLES['cancelled'] = 'yellow'


class LiveView:
    """Renders the present state of a run (None: the newest one). U needs an exact allocator."""

    def __init__(
        self, journal: Journal, allocator: Allocator | None = None, run: str | None = None
    ) -> None:
        self._journal, self._run = journal, run
        self._allocator = None if allocator is None else CachedAllocator(allocator)

    def snapshot(self, now: float) -> status.RunStatus:
        return status.snapshot(self._journal.history(), now, self._allocator, self._run)


def plain_lines(seen: status.RunStatus) -> list[str]:
    return [_plain_line(t, seen.elapsed_s) for t in seen.trainers]


class Screen:
    """A snapshot for a console; fits any from 40 columns on."""

    def __init__(self, seen: status.RunStatus) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen = self._seen
        yield _heading(seen)
        table = _trainer_table(seen.trainers, bar=6 if options.max_width < 90 else 12)
        if _fits(table, console, options):
            yield table
        else:
            yield from (_trainer_lines(trainer) for trainer in seen.trainers)
        shown = seen.blocks[:MOST_BLOCKS]
        table = _block_table(shown)
        if shown and _fits(table, console, options):
            yield table
        else:
            for block in shown:
                who = ', '.join(block.trainers) or 'idle'
                yield _cut(
                    f'{block.name}: {nodes_text(block.nodes)}, {texts.left_text(block)}, {who}'
                )
        if len(seen.blocks) > MOST_BLOCKS:
            yield _cut(f'and {len(seen.blocks) - MOST_BLOCKS} more blocks', 'dim')
        lines = (*map(status.limit_in_words, seen.limits), *status.resumes_in_words(seen.trainers))
        yield from (Text(clean(line), 'dim') for line in lines)
        for sentence in filter(None, (seen.life.sentence, *seen.damage)):
            yield Text(clean(sentence), 'yellow')


def _fits(table: Table, console: Console, options: ConsoleOptions) -> bool:
    # If a table had to cut its columns, a few short lines are better.
    width = Measurement.get(console, options.update(max_width=1000), table).maximum
    return width <= options.max_width


class ClosingTable:
    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trainers: Mapping[str, Mapping[str, Any]] = self._summary['trainers']
        rows = {name: _closing_cells(t) for name, t in trainers.items()}
        titles = list(dict.fromkeys(title for cells in rows.values() for title in cells))
        table = _table('trainer', *titles)
        for name, cells in rows.items():
            table.add_row(Text(clean(name)), *(cells.get(title, '') for title in titles))
        if _fits(table, console, options):
            yield table
        else:
            for name, cells in rows.items():
                yield _cut(clean(name), 'bold')
                for title, cell in cells.items():
                    yield _cut(f'  {title}: {cell}')
        node_s = self._summary['node_s']
        whole = node_s['offered'] or 1.0
        parts = ((kind, 100 * s / whole) for kind, s in node_s.items() if kind != 'offered')
        shares = ', '.join(f'{kind} {part:.0f}%' for kind, part in parts)
        yield Text(f'node-seconds: {node_s["offered"]:.0f} offered, of these {shares}')
        blocks, killed = self._summary['blocks'], self._summary['blocks_killed']
        in_all = f'{texts.duration_text(self._summary["wall_s"])} in all'
        yield Text(f'blocks: {blocks}, killed while training: {killed}; {in_all}')


def _closing_cells(trainer: Mapping[str, Any]) -> dict[str, str]:
    expected = trainer['samples_expected']
    cells = {
        'frag': str(trainer['fragments']),
        'pre': str(trainer['preempted']),
        'resc': str(trainer['rescaled']),
        'resumes': f'{trainer["resumes"]} ({trainer["verified"]} verified)',
        'samples': f'{trainer["samples"]:,}' + (f'/{expected:,}' if expected is not None else ''),
        'repeated': f'{trainer["samples_repeated"]:,}',
    }
    if trainer.get('accuracy') is not None:
        cells['accuracy'] = f'{100 * trainer["accuracy"]:.2f}%'
    if trainer.get('accuracy_undisturbed') is not None:
        cells['undist.'] = f'{100 * trainer["accuracy_undisturbed"]:.2f}%'
    if trainer.get('weights_equal') is not None:
        cells['weights'] = 'equal' if trainer['weights_equal'] else 'DIFFER'
    return cells


def _heading(seen: status.RunStatus) -> Text:
    text = Text('FreeTrain', 'bold', no_wrap=True, overflow='ellipsis')
    of_life = {'died': 'bold red', 'silent': 'yellow'}.get(seen.life.state, 'not bold')
    style = of_life if seen.ended is None else 'dim'
    return text.append(f'  {texts.heading_words(seen)}', style)


def _trainer_table(trainers: Sequence[status.TrainerNow], bar: int) -> Table:
    rows = [(t, texts.trainer_cells(t)) for t in trainers]
    titles = list(rows[0][1])[1:] if rows else []
    table = _table('trainer', 'state', 'nodes', 'progress', *titles)
    for column in (0, 1, 3):
        table.columns[column].justify = 'left'
    for t, cells in rows:
        done = min(t.samples, t.total) if t.total else 0
        table.add_row(
            Text(clean(t.name), overflow='ellipsis'),
            Text(clean(t.state), STATE_STYLES.get(t.state, '')),
            str(t.nodes),
            ProgressBar(total=t.total or 1, completed=done, width=bar),
            *list(cells.values())[1:],
        )
    return table


def _trainer_lines(t: status.TrainerNow) -> RenderableType:
    name = Text(no_wrap=True, overflow='ellipsis')
    name.append(clean(t.name), 'bold')
    name.append(f' {clean(t.state)}', STATE_STYLES.get(t.state, ''))
    name.append(clean(f', {nodes_text(t.nodes)}{texts.in_shape(t)}'))
    parts: list[RenderableType] = [name]
    if t.total:
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=t.total, completed=min(t.samples, t.total), width=38))
        parts.append(bar)
    parts.append(
        _cut(f'  {texts.samples_text(t)} at {texts.rate_text(t.rate)}, {texts.metric_text(t)}')
    )
    counts = f'frag {t.fragments}, pre {t.preempted}, resc {t.rescaled}'
    parts.append(_cut(f'  U {texts.value_text(t.efficiency, ".2f")}, {counts}'))
    if t.finish_s is not None:
        parts.append(_cut(f'  done in {texts.finish_text(t)}'))
    return Group(*parts)


def _block_table(blocks: Sequence[status.BlockNow]) -> Table:
    table = _table('block', 'nodes', 'time left', 'trainers')
    table.columns[3].justify = 'left'
    for block in blocks:
        cells = map(clean, texts.block_cells(block).values())
        table.add_row(*(Text(cell, overflow='ellipsis') for cell in cells))
    return table


def _plain_line(t: status.TrainerNow, elapsed_s: float) -> str:
    parts = [
        f'{texts.duration_text(elapsed_s)} {t.name}: {t.state}',
        f'{nodes_text(t.nodes)}{texts.in_shape(t)}',
        f'{texts.samples_text(t)} samples',
        texts.metric_text(t),
        texts.rate_text(t.rate),
        f'U {texts.value_text(t.efficiency, ".2f")}',
        f'fragments {t.fragments}, preempted {t.preempted}, rescaled {t.rescaled}',
        *([] if t.finish_s is None else [f'done in {texts.finish_text(t)}']),
    ]
    return clean(', '.join(parts))


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style='dim')
    for i, title in enumerate(titles):
        side: Any = 'right' if i else 'left'
        table.add_column(title, justify=side, no_wrap=True, overflow='ellipsis')
    return table


def _cut(line: str, style: str = '') -> Text:
    return Text(clean(line), style, no_wrap=True, overflow='ellipsis')
