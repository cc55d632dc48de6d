"""The report as one HTML page."""

from __future__ import annotations

from datetime import datetime
from html import escape
from statistics import median

from parsl_freetrain import __version__
from parsl_freetrain.report import pictures
from parsl_freetrain.report.axes import duration, number
from parsl_freetrain.report.causes import Cause
from parsl_freetrain.report.document import clipped, heading, legend, page, paragraph, table, tiles
from parsl_freetrain.report.figures import Figures, state_of

MOST_CARDS = 24
"""So many trainers have pictures; all are in the table."""

MOST_ERRORS = 20

CHANGES = {'up': 'to more nodes', 'down': 'to fewer nodes', 'start': 'from no nodes'}


def report_page(found: Figures) -> str:
    """One HTML document that needs nothing else: no network, no scripts."""
    parts = [_head(found), _node_hours(found), _nodes(found), _trainers(found), _cards(found), _rescales(found), _predictions(found),
             _errors(found), _foot(found)]
    return page(f'FreeTrain report: {found.title}', '\n'.join(part for part in parts if part))


def _head(found: Figures) -> str:
    runs = found.story.runs
    first, last = runs[0], runs[-1]
    goes_on = found.story.alive(last)
    ended = 'goes on' if goes_on else f'ended: {last.how}' if last.ended_at is not None else 'was not ended by anybody'
    trainers = found.summary['trainers'].values()
    share = _shares(found)
    command = f'<p class="quiet"><code>{escape(clipped(first.command))}</code></p>' if first.command else ''
    which = 'the last one ' if len(runs) > 1 else ''
    return heading(f'FreeTrain report: {found.title}', 1) + paragraph(
        f'Began {_date(first.begun_at)}, {duration(found.summary["wall_s"])} in all; {which}{clipped(ended)}.', 'quiet') + command + tiles({
            'node-hours offered': _hours(found.summary['node_s']['offered']),
            'of them turned into training': share['trained'],
            'lost: trained and not kept': share['lost'],
            'trainers finished': f'{sum(t["state"] == "finished" for t in trainers)} of {len(trainers)}',
            'samples trained and kept': number(sum(t['samples'] for t in trainers)),
            'preemptions survived': str(sum(t['preempted'] for t in trainers)),
        })


def _node_hours(found: Figures) -> str:
    total = sum(cause.node_s for cause in found.causes)
    rows = [(cause.kind, _hours(cause.node_s), _percent(cause.node_s, total), cause.why) for cause in found.causes if cause.node_s > 0]
    return (heading('Node-hours offered, and what became of them') + _bar(found.causes, total)
            + legend({cause.kind: cause.kind for cause in found.causes}, 'bar')
            + table(('', 'node-hours', 'share', 'what it was'), [*rows, ('offered', _hours(total), '', '')], long=(3,)))


def _bar(causes: tuple[Cause, ...], total: float) -> str:
    if not total:
        return paragraph('No node was offered.')
    drawn, at = [], 0.0
    for cause in causes:
        if cause.node_s > 0:
            name = escape(f'{cause.kind}, {_percent(cause.node_s, total)}: {cause.why}')
            drawn.append(f'<rect class="area {cause.kind}" x="{100 * at / total:.3f}%" width="{100 * cause.node_s / total:.3f}%" '
                         f'height="100%"><title>{name}</title></rect>')
            at += cause.node_s
    return f'<svg class="plot bar" role="img" aria-label="shares of the node-hours, as in the table below">{"".join(drawn)}</svg>'


def _nodes(found: Figures) -> str:
    of = pictures.kinds(found)
    named = {name: kind for name, kind in of.items() if kind != 'others'}
    others = len(of) - len(named)
    keys = {**{clipped(n, 60): k for n, k in named.items()}, **({f'{others} other trainers': 'others'} if others else {}),
            'offered, idle': 'offered'}
    rows = pictures.nodes_one_by_one(found)
    one_by_one = '' if rows is None else (
        heading('One by one', 4) + rows + legend({'lost': 'lost'})
        + paragraph('Pale: starting, or writing a checkpoint. ×: the node was taken while a fragment trained on it.', 'quiet'))
    joints = paragraph('Dashed lines: the workflow was started again.', 'quiet') if found.clock.joints else ''
    return heading('Nodes over time') + pictures.nodes_over_time(found) + legend(keys) + one_by_one + joints


def _trainers(found: Figures) -> str:
    rows = []
    for name, t in found.summary['trainers'].items():
        total = t['samples_expected']
        gain = found.efficiency.get(name)
        rows.append((clipped(name, 60), state_of(found, name), f'{t["samples"]:,}' + (f' of {total:,}' if total else ''),
                     '–' if gain is None else f'{gain:.2f}', str(t['fragments']), str(t['preempted']), str(t['failed']), str(t['rescaled']),
                     f'{t["samples_repeated"]:,}'))
    head = ('trainer', 'state', 'samples', 'U', 'fragments', 'preempted', 'failed', 'rescaled', 'repeated samples')
    return heading('Trainers') + table(head, rows, text=(0, 1)) + paragraph(
        'U: what its node-hours were worth, against a constant pool with as many node-hours.', 'quiet')


def _cards(found: Figures) -> str:
    of = pictures.kinds(found)
    rows = found.summary['trainers']
    shown = sorted(rows, key=lambda name: -rows[name]['samples'])[:MOST_CARDS]
    cards = [_card(found, name, of[name]) for name in rows if name in shown]
    rest = paragraph(f'Of {len(rows)} trainers the {MOST_CARDS} that trained most are shown.', 'quiet') if len(rows) > MOST_CARDS else ''
    return heading('Loss and speed, trainer by trainer') + rest + f'<div class="cards">{"".join(cards)}</div>' + paragraph(
        'Dashed red: preempted. What was repeated afterwards is drawn again. In the pictures of the speed, dots are what fragments '
        'reported, and the line is the curve: as learned, or of the shape that was stated.', 'quiet')


def _card(found: Figures, name: str, kind: str) -> str:
    learned = found.scalings[name]
    why = found.summary['trainers'][name]['why']
    drawn = [
        ('loss over samples', pictures.loss_over_samples(name, found.losses[name], kind)),
        ('loss over time', pictures.loss_over_time(name, found.losses[name], kind, found)),
        (f'samples/s over nodes, {"in the shape that was stated" if learned.stated else "as learned"}', pictures.scaling(learned, kind)),
    ]
    missing = [what for what, picture in drawn if picture is None]
    return (f'<section class="card">{heading(clipped(name, 120), 3)}' + paragraph(
        f'{state_of(found, name)}{f": {clipped(why)}" if why else ""}', 'quiet')
        + ''.join(heading(what, 4) + picture for what, picture in drawn if picture is not None)
        + (paragraph(f'Nothing was reported for: {", ".join(missing)}.', 'quiet') if missing else '') + '</section>')


def _rescales(found: Figures) -> str:
    if not found.rescales:
        return ''
    rows = [(clipped(c.trainer, 60), CHANGES[c.change], '–' if c.change == 'start' else f'{c.assumed_s:.3g} s',
             f'{median(c.measured_s):.3g} s', f'{min(c.measured_s):.3g} to {max(c.measured_s):.3g} s', str(len(c.measured_s)))
            for c in found.rescales]
    return heading('What changes of nodes cost: assumed and measured') + table(
        ('trainer', 'change', 'assumed', 'measured, median', 'range', 'changes'), rows, text=(0, 1)) + paragraph(
        'Measured: from the last step before the change to the first step after it, without waiting for nodes.', 'quiet')


def _predictions(found: Figures) -> str:
    compared = [o for o in found.outcomes if o.expected is not None]
    head = heading('Predicted and actual')
    if not compared:
        return head + paragraph('There was no decision about a trainer whose speed was known already.')
    expected, staying = sum(o.expected or 0.0 for o in compared), sum(o.staying or 0.0 for o in compared)
    trained = sum(o.trained for o in compared)
    ratio = f' ({_percent(trained, expected)} of it)' if expected else ''
    took = found.decisions
    return head + paragraph(
        f'{len(compared)} decisions gave a trainer another number of nodes when its speed was known. For as long as each of them stood, '
        f'{number(expected)} samples were predicted in all; {number(trained)} were trained and kept{ratio}. Changing nothing was '
        f'predicted to train {number(staying)}.'
    ) + (pictures.predicted_and_actual(found) or '') + paragraph(
        'Each dot is one decision about one trainer: to the right what was predicted, upwards what was trained and kept; both in samples. '
        'Predictions go by the speed and the scaling curve as they were known at the time, and by the assumed cost of the change; nobody '
        'can know beforehand when nodes are taken.', 'quiet') + paragraph(
        f'In all there were {took.count} decisions ({", ".join(f"{count} {status}" for status, count in took.by_status.items())}); '
        f'the solver took {1000 * took.median_s:.3g} ms in the median, {1000 * took.longest_s:.3g} ms at most.', 'quiet')


def _errors(found: Figures) -> str:
    if not found.errors:
        return ''
    shown = ''.join(f'{heading(f"{clipped(name, 60)}, fragment {fragment}", 4)}<pre>{escape(clipped(error, 1500))}</pre>'
                    for name, fragment, error in found.errors[:MOST_ERRORS])
    rest = len(found.errors) - MOST_ERRORS
    return heading('What went wrong') + shown + (paragraph(f'And {rest} earlier ones.', 'quiet') if rest > 0 else '')


def _foot(found: Figures) -> str:
    when = escape(_date(found.now))
    return f'<footer><p>Written {when} by parsl-freetrain {escape(__version__)}, from the ledger of the run.</p></footer>'


def _shares(found: Figures) -> dict[str, str]:
    node_s = found.summary['node_s']
    return {kind: _percent(seconds, node_s['offered']) for kind, seconds in node_s.items()}


def _percent(part: float, whole: float) -> str:
    return f'{100 * part / whole:.1f} %' if whole else '–'


def _hours(node_s: float) -> str:
    hours = node_s / 3600
    return f'{hours:,.0f}' if hours >= 1000 else f'{hours:.3g}'


def _date(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime('%Y-%m-%d %H:%M:%S %Z')
