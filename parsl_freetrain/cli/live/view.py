"""The live view of a run, read from its ledger: in the run's own terminal or another one."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
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
    found = [(metric, name, points) for metric, of in curves.items() for name, points in of.items()]
    rows: list[Row] = []
    for metric, name, points in found[:MOST_LINES]:
        values = [value for *_, value in points]
        course = sparkline([(samples, value) for samples, *_, value in points])
        last = {'now': values[-1], 'smallest': min(values), 'largest': max(values)}
        row = {'metric': metric, 'trainer': name, 'over samples': course}
        rows.append({**row, **{title: f'{value:.4g}' for title, value in last.items()}})
    if len(found) > MOST_LINES:
        more = f'and {len(found) - MOST_LINES} more'
        rows.append({'metric': more, 'over samples': 'freetrain report'})
    return _table(rows)


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


LEFT = {'trainer', 'state', 'progress', 'block', 'trainers', 'metric', 'over samples'}  # columns
MOST_BLOCKS = 12  # maximum number of open blocks to list; the others are counted
STATE_STYLES = {'running': 'green', 'finished': 'bold green', 'failed': 'bold red'}
STATE_STYLES['cancelled'] = 'yellow'

Row = Mapping[str, Any]  # its cells by title: str, Text, or ProgressBar


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
        bar = 6 if options.max_width < 90 else 12
        yield from _rows([_trainer_cells(t, bar) for t in seen.trainers], console, options)
        blocks = [texts.block_cells(block) for block in seen.blocks[:MOST_BLOCKS]]
        yield from _rows(blocks, console, options)
        if len(seen.blocks) > MOST_BLOCKS:
            yield Text(f'and {len(seen.blocks) - MOST_BLOCKS} more blocks', 'dim')
        lines = (*map(status.limit_in_words, seen.limits), *status.resumes_in_words(seen.trainers))
        yield from (Text(clean(line), 'dim') for line in lines)
        reasons = [f'{t.name}: {t.why}' for t in seen.trainers if t.why][:MOST_LINES]
        for sentence in filter(None, (*reasons, seen.life.sentence, *seen.damage)):
            yield Text(clean(sentence), 'yellow')


def _rows(rows: Sequence[Row], console: Console, options: ConsoleOptions) -> RenderResult:
    """A table; or, as it would have to cut its columns here, each row in a few lines."""
    table = _table(rows)
    if Measurement.get(console, options.update(max_width=1000), table).maximum <= options.max_width:
        yield from [table] * bool(rows)
        return
    for row in rows:
        (_, name), *cells = ((title, _text(cell)) for title, cell in row.items())
        said = (Text.assemble(f'{title} ', cell) for title, cell in cells if title != 'progress')
        yield Text.assemble(name, ': ', Text(', ').join(said))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style='dim')
    titles = list(dict.fromkeys(title for row in rows for title in row))
    for title in titles:
        side: Any = 'left' if title in LEFT else 'right'
        table.add_column(title, justify=side, no_wrap=True, overflow='ellipsis')
    for row in rows:
        table.add_row(*(_text(row.get(title, '')) for title in titles))
    return table


def _text(cell: Any) -> Any:
    return Text(clean(cell), overflow='ellipsis') if isinstance(cell, str) else cell


class ClosingTable:
    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trainers: Mapping[str, Mapping[str, Any]] = self._summary['trainers']
        rows = [{'trainer': name, **_closing_cells(t)} for name, t in trainers.items()]
        yield from _rows(rows, console, options)
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


def _trainer_cells(t: status.TrainerNow, bar: int) -> Row:
    done = min(t.samples, t.total) if t.total else 0
    return {
        'trainer': t.name,
        'state': Text(clean(t.state), STATE_STYLES.get(t.state, '')),
        'nodes': str(t.nodes),
        'progress': ProgressBar(total=t.total or 1, completed=done, width=bar),
        **texts.trainer_cells(t),
    }


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
        *([t.why] if t.why else []),
    ]
    return clean(', '.join(parts))
