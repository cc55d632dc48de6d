"""The report as one HTML page, from the template ``report.html``."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from parsl_freetrain import __version__
from parsl_freetrain.core.model.errors import clean
from parsl_freetrain.report import charts
from parsl_freetrain.report.cells import block_cells, in_shape, trainer_cells
from parsl_freetrain.report.figures import Figures
from parsl_freetrain.report.learned import MeasuredScaling
from parsl_freetrain.report.metrics import MetricView
from parsl_freetrain.report.status import RunStatus, limit_in_words, resumes_in_words
from parsl_freetrain.report.svg import duration, number

MOST_CARDS = 24  # maximum number of trainers with charts; all are in the table
MOST_ERRORS = 20

MOST_BLOCKS = 48  # maximum number of open blocks to list
MOST_METRICS = 24  # maximum number of metrics with a chart
AS_REPORTED = MetricView()

CHANGES = {'up': 'to more nodes', 'down': 'to fewer nodes', 'start': 'from no nodes'}


def report_page(found: Figures, view: MetricView = AS_REPORTED) -> str:
    """One HTML document that loads nothing, runs no script and sends nothing."""
    style = resource('style.css')
    return template('report.html').render(
        found=found,
        runs=found.history.runs,
        summary=found.summary,
        version=__version__,
        most_errors=MOST_ERRORS,
        style=Markup(style),  # noqa: S704 - our own file
        policy=f"default-src 'none'; style-src {source_of(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        ended=_ended(found),
        tiles=_tiles(found),
        **_at_present(found.status),
        **_node_hours(found),
        nodes_over_time=charts.nodes_over_time(found),
        nodes_one_by_one=charts.nodes_one_by_one(found),
        trainer_kinds=_trainer_kinds(found),
        metric_kinds={n: kind for n, kind in _trainer_kinds(found).items() if kind != 'offered'},
        trainer_rows=[_trainer_row(found, name) for name in found.summary['trainers']],
        cards=_cards(found),
        view=view,
        **_metrics(found, view),
        most_metrics=MOST_METRICS,
        rescale_rows=_rescale_rows(found),
        shape_rows=[
            (
                clipped(t.trainer, 60),
                str(t.nodes),
                t.shape,
                '–' if t.rate is None else number(t.rate),
                number(t.memory / 1e9) if t.memory else '–',
                'in use' if t.newest else '',
            )
            for t in found.shapes
        ],
        **_predictions(found),
    )


def _ended(found: Figures) -> str:
    last = found.history.runs[-1]
    if found.history.alive(last):
        return 'goes on'
    return f'ended: {last.how}' if last.ended is not None else 'died'


def _tiles(found: Figures) -> dict[str, str]:
    trainers, node_s = found.summary['trainers'].values(), found.summary['node_s']
    finished = sum(t['state'] == 'finished' for t in trainers)
    return {
        'node-hours offered': _hours(node_s['offered']),
        'of them turned into training': percent(node_s['trained'], node_s['offered']),
        'lost: trained and not kept': percent(node_s['lost'], node_s['offered']),
        **({} if (u := found.efficiency.of_run) is None else {'efficiency U': f'{u:.2f}'}),
        'trainers finished': f'{finished} of {len(trainers)}',
        'samples trained and kept': number(sum(t['samples'] for t in trainers)),
        'preemptions survived': str(sum(t['preempted'] for t in trainers)),
    }


def _at_present(status: RunStatus) -> dict[str, Any]:
    """The trainers and blocks of a run that goes on; their U is in the table of all trainers."""
    if status.life.state not in ('running', 'silent'):
        return {'said_now': None}
    trainers = [
        {'trainer': clipped(t.name, 60), 'state': f'{t.state}{in_shape(t)}', **trainer_cells(t)}
        for t in status.trainers
    ]
    for cells in trainers:
        del cells['U']
    blocks = [block_cells(block) for block in status.blocks]
    more = len(blocks) - MOST_BLOCKS
    return {
        'trainers_now': _table(trainers),
        'blocks_now': _table(blocks[:MOST_BLOCKS]),
        'said_now': [
            *([f'And {more} more blocks.'] if more > 0 else []),
            *map(limit_in_words, status.limits),
            *resumes_in_words(status.trainers),
        ],
    }


def _table(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]] | None:
    return (list(rows[0]), [list(row.values()) for row in rows]) if rows else None


def _node_hours(found: Figures) -> dict[str, Any]:
    total = sum(cause.node_s for cause in found.causes)
    bar, at = [], 0.0
    for cause in found.causes:
        if cause.node_s > 0:
            bar.append((f'{100 * at / total:.3f}', f'{100 * cause.node_s / total:.3f}', cause))
            at += cause.node_s
    rows = [(c.name, _hours(c.node_s), percent(c.node_s, total), c.why) for _, _, c in bar]
    return {
        'total_node_s': total,
        'bar': bar,
        'cause_kinds': {cause.kind: cause.kind for cause in found.causes},
        'cause_rows': [*rows, ('offered', _hours(total), '', '')],
    }


def _trainer_kinds(found: Figures) -> dict[str, str]:
    of = charts.kinds(found)
    named = {name: kind for name, kind in of.items() if kind != 'others'}
    others = len(of) - len(named)
    return {
        **{clipped(name, 60): kind for name, kind in named.items()},
        **({f'{others} other trainers': 'others'} if others else {}),
        'offered, idle': 'offered',
    }


def _trainer_row(found: Figures, name: str) -> tuple[str, ...]:
    t, gain = found.summary['trainers'][name], found.efficiency.by_trainer.get(name)
    total = t['samples_expected']
    return (
        clipped(name, 60),
        found.states[name],
        f'{t["samples"]:,}' + (f' of {total:,}' if total else ''),
        '–' if gain is None else f'{gain:.2f}',
        *(str(t[key]) for key in ('fragments', 'preempted', 'failed', 'rescaled')),
        f'{t["samples_repeated"]:,}',
    )


def _cards(found: Figures) -> list[dict[str, Any]]:
    of, rows = charts.kinds(found), found.summary['trainers']
    shown = sorted(rows, key=lambda name: -rows[name]['samples'])[:MOST_CARDS]
    cards = []
    for name in rows:
        if name not in shown:
            continue
        learned, kind = found.scalings[name], of[name]
        cards.append(
            {
                'name': name,
                'state': found.states[name],
                'why': rows[name]['why'],
                'charts': [
                    *charts.losses(name, found.losses[name], kind, found),
                    *((_of_scaling(one), charts.scaling(one, kind)) for one in learned),
                ],
            }
        )
    return cards


def _of_scaling(learned: MeasuredScaling) -> str:
    on_class = f' of {learned.node_class}' if learned.node_class else ''
    how = 'stated' if learned.stated else 'learned'
    return f'samples/s by number of nodes{on_class}; line: the {how} scaling curve'


def _metrics(found: Figures, view: MetricView) -> dict[str, Any]:
    """Charts, and the values of metrics of which each trainer has only one."""
    drawn: list[tuple[str, Markup]] = []
    single: list[tuple[str, ...]] = []
    for name, curves in list(found.metrics.items())[:MOST_METRICS]:
        if all(len(curve) == 1 for curve in curves.values()):
            single += [
                (clipped(name, 60), clipped(trainer, 60), number(curve[0].value))
                for trainer, curve in curves.items()
            ]
        elif chart := charts.metric(clipped(name, 60), curves, view, found):
            drawn.append((clipped(name, 60), chart))
    return {'metrics': drawn, 'single_values': single}


def _rescale_rows(found: Figures) -> list[tuple[str, ...]]:
    return [
        (
            clipped(c.trainer, 60),
            CHANGES[c.change],
            '–' if c.change == 'start' else f'{c.assumed_s:.3g} s',
            f'{median(c.measured_s):.3g} s',
            f'{min(c.measured_s):.3g} to {max(c.measured_s):.3g} s',
            str(len(c.measured_s)),
        )
        for c in found.rescales
    ]


def _predictions(found: Figures) -> dict[str, Any]:
    compared = [o for o in found.outcomes if o.expected is not None]
    return {
        'compared': compared,
        'expected': sum(o.expected or 0.0 for o in compared),
        'staying': sum(o.staying or 0.0 for o in compared),
        'trained': sum(o.trained for o in compared),
        'predicted_and_actual': charts.predicted_and_actual(found),
    }


def _hours(node_s: float) -> str:
    hours = node_s / 3600
    return f'{hours:,.0f}' if hours >= 1000 else f'{hours:.3g}'


def resource(name: str) -> str:
    return (files('parsl_freetrain.report') / name).read_text(encoding='utf-8')


def source_of(text: str) -> str:
    """The source expression of an inline style sheet or script for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def template(name: str) -> Template:
    """A page of this package; inserted text is escaped unless it is ``Markup``."""
    environment = Environment(
        loader=PackageLoader('parsl_freetrain', 'report'),
        autoescape=True,
        finalize=lambda v: type(v)(clean(v, keep='\n\t')) if isinstance(v, str) else v,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        clipped=clipped, date=date, duration=duration, number=number, percent=percent
    )
    return environment.get_template(name)


def clipped(text: str, most: int = 400) -> str:
    """The text without control characters, with at most ``most`` characters."""
    plain = clean(' '.join(text.split()))
    return plain if len(plain) <= most else plain[: most - 1] + '…'


def percent(part: float, whole: float) -> str:
    return f'{100 * part / whole:.1f} %' if whole else '–'


def date(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime('%Y-%m-%d %H:%M:%S %Z')
