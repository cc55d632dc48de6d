"""The rows of the comparison, as Markdown and as a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.versus.measures import ARRIVAL, NODE, RANK, Run, cpu_ms, next_step, work

Value = float | bool | None


@dataclass(frozen=True)
class Row:
    """A row: its words, and how its values are written; ``lower``: whether less is better."""

    text: str
    form: str
    lower: bool = True


ROWS = {
    'node': Row('a node is killed → next step, s', '.2f'),
    'rank': Row('a rank is killed → next step, s', '.2f'),
    'block': Row('a node dies, its block goes on → next step, s', '.2f'),
    'arrival': Row('a node arrives → first step on it, s', '.1f'),
    'goodput': Row('goodput: share of what its own undisturbed speed allows', '.2f', False),
    'useful': Row('useful samples per second', '.0f', False),
    'repeated': Row('samples trained again', '.0f'),
    'bits': Row('the same bits as undisturbed', ''),
    'cpu': Row('CPU time per step and rank, 3 nodes, undisturbed, ms', '.1f'),
    'first': Row('command → first step, s', '.1f'),
}


@dataclass
class Column:
    """A system's values, by row, one or more for each round; None: not within the limit."""

    name: str
    not_measured: str = ''
    values: dict[str, list[Value]] = field(default_factory=dict)

    def add(self, run: Run, with_block: Run | None) -> None:
        """The values of a round."""
        done = work(run)
        kinds = {NODE: 'node', RANK: 'rank', ARRIVAL: 'arrival'}
        for event in run.events:
            self._put(kinds[event.kind], next_step(run, event))
        if with_block is not None:
            self._put('block', next_step(with_block, with_block.events[-1]))
        self._put('goodput', done.goodput)
        self._put('useful', done.samples_per_s)
        self._put('repeated', float(done.repeated))
        self._put('cpu', cpu_ms(run))
        self._put('first', min(step.ended for step in run.steps) - run.commanded)

    def bits(self, same: bool | None) -> None:
        self._put('bits', same)

    def _put(self, row: str, value: Value) -> None:
        self.values.setdefault(row, []).append(value)


def cell(row: Row, values: Sequence[Value]) -> str:
    """A median with its range, or words."""
    if not values:
        return '–'
    if not row.form:
        return 'not known' if None in values else 'yes' if all(values) else 'no'
    numbers = [float(value) for value in values if value is not None]
    missing = len(values) - len(numbers)
    if not numbers:
        return 'not in time'
    middle, low, high = (f(numbers) for f in (statistics.median, min, max))
    text = f'{middle:{row.form}}'
    if len(numbers) > 1:
        text += f' ({low:{row.form}} to {high:{row.form}})'
    return text + (f', {missing} of {len(values)} not in time' if missing else '')


def markdown(columns: Sequence[Column]) -> str:
    """The table; what could not be run has its reason below."""
    there = [column for column in columns if not column.not_measured]
    lines = ['| | ' + ' | '.join(c.name for c in there) + ' |', '|---' * (1 + len(there)) + '|']
    for key, row in ROWS.items():
        cells = [cell(row, column.values.get(key, [])) for column in there]
        if key == 'block':
            cells = ['no blocks' if text == '–' else text for text in cells]
        lines.append(f'| {row.text} | ' + ' | '.join(cells) + ' |')
    without = [f'- {c.name}: {c.not_measured}' for c in columns if c.not_measured]
    return '\n'.join(lines) + '\n' + ('\n' + '\n'.join(without) + '\n' if without else '')


def picture(columns: Sequence[Column], path: Path) -> None:
    """A panel for each row with numbers: a dot for each value, a bar for the median."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    there = [column for column in columns if not column.not_measured]
    shown = [(key, row) for key, row in ROWS.items() if row.form]
    figure, panels = plt.subplots(3, 3, figsize=(13, 2.0 + 1.1 * len(there)), sharey=True)
    for (key, row), panel in zip(shown, panels.flat, strict=True):
        for place, column in enumerate(there):
            if values := [float(v) for v in column.values.get(key, []) if v is not None]:
                panel.barh(place, statistics.median(values), color='#9ecae1')
                panel.plot(values, [place] * len(values), 'o', color='#08519c', markersize=4)
        panel.set_title(row.text + (' (less is better)' if row.lower else ''), fontsize=8)
        panel.tick_params(labelsize=8)
    panels[0, 0].set_yticks(range(len(there)), [column.name for column in there])
    panels[0, 0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def document(columns: Sequence[Column], facts: dict[str, Any]) -> dict[str, Any]:
    """What the JSON file has."""
    rows = ((c.name, c.not_measured, c.values) for c in columns)
    fields = ('name', 'not_measured', 'values')
    return {**facts, 'systems': [dict(zip(fields, row, strict=True)) for row in rows]}


def columns_of(document: dict[str, Any]) -> list[Column]:
    """The columns of a JSON file."""
    return [Column(**system) for system in document['systems']]
