"""The charts of a report."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from parsl_freetrain.core.model.errors import nodes_text
from parsl_freetrain.report import timeline as tl
from parsl_freetrain.report.figures import Figures
from parsl_freetrain.report.learned import MeasuredScaling
from parsl_freetrain.report.metrics import CurvePoint, Losses, MetricView, smoothed
from parsl_freetrain.report.svg import Chart, Scale, duration, linear, logarithmic, number, seconds

MOST_COLOURED = 8  # maximum number of trainers with a colour of their own; the others share one
MOST_ROWS = 48  # maximum number of nodes with a row of their own
MOST_DOTS = 20  # maximum number of points of a metric that are drawn as dots too
MOST_MOMENTS = 2000  # maximum number of moments at which numbers of nodes are drawn
Box = tuple[float, float, float, float]


def kinds(found: Figures) -> dict[str, str]:
    """By trainer, its class of the style sheet; those that trained most have their own colours."""
    rows = found.summary['trainers']
    ranked = sorted(rows, key=lambda name: -rows[name]['samples'])[:MOST_COLOURED]
    coloured = [name for name in rows if name in ranked]
    return {name: f't{coloured.index(name)}' if name in ranked else 'others' for name in rows}


def nodes_over_time(found: Figures) -> Markup:
    clock, of = found.clock, kinds(found)
    steps: dict[str, list[tuple[float, int]]] = defaultdict(list)
    room: list[tuple[float, int]] = []
    for run in found.history.runs:
        for times in tl.offered(run, clock.until[run.id]).values():
            for start, end in times:
                room += [(clock.of(run.id, start), 1), (clock.of(run.id, end), -1)]
    for fragment in found.history.fragments:
        end = clock.until[fragment.run] if fragment.ended_at is None else fragment.ended_at
        name = fragment.trainer if of.get(fragment.trainer, 'others') != 'others' else ''
        count = len(fragment.nodes)
        begun = clock.of(fragment.run, fragment.launched.at)
        steps[name] += [(begun, count), (clock.of(fragment.run, end), -count)]
    moments = {x for changes in (room, *steps.values()) for x, _ in changes}
    grid = sorted({0.0, clock.length} | moments)
    if len(grid) > MOST_MOMENTS:
        grid = [clock.length * i / MOST_MOMENTS for i in range(MOST_MOMENTS + 1)]
    most = tl.levels(room, grid)
    stacked = [(name, tl.levels(steps[name], grid)) for name in [*of, ''] if name in steps]
    peak = max([1, *most, *map(sum, zip(*(level for _, level in stacked), strict=True))])
    label = f'nodes over time; at most {max(most)} were offered'
    chart = Chart(seconds(clock.length), linear(0, peak, whole=True), label)
    chart.steps(grid, [0] * len(grid), most, 'offered', 'offered')
    floor = [0] * len(grid)
    for name, level in stacked:
        ceiling = [a + b for a, b in zip(floor, level, strict=True)]
        chart.steps(grid, floor, ceiling, of.get(name, 'others'), name or 'other trainers')
        floor = ceiling
    _joints(chart, found)
    return chart.svg()


def nodes_one_by_one(found: Figures) -> Markup | None:
    history, clock, of = found.history, found.clock, kinds(found)
    seen = {o.node for run in history.runs for o in run.offers.values()}
    names = sorted(seen | {node.name for node in history.nodes}, key=tl.natural_order)
    if not 0 < len(names) <= MOST_ROWS:
        return None
    row = {name: i for i, name in enumerate(names)}
    label = f'what each of {nodes_text(len(names))} did'
    size = 'tall' if len(names) > 12 else 'middle'
    chart = Chart(seconds(clock.length), None, label, size)
    boxes: dict[tuple[str, str, str], list[Box]] = defaultdict(list)

    def add(
        kind: tuple[str, str, str], run: int, name: str, times: Sequence[tl.Interval], margin: float
    ) -> None:
        top, bottom = (row[name] + margin) / len(names), (row[name] + 1 - margin) / len(names)
        seen = ((clock.of(run, start), clock.of(run, end)) for start, end in times)
        boxes[kind] += [(start, end, top, bottom) for start, end in seen]

    for run in history.runs:
        until = clock.until[run.id]
        for name, times in tl.offered(run, until).items():
            add(('offered', '', 'offered'), run.id, name, times, 0.06)
        parts_of = tl.phases_of(history, run, until)
        for fragment in run.fragments.values():
            colour = of.get(fragment.trainer, 'others')
            for place in [run.nodes[node] for node in fragment.nodes if node in run.nodes]:
                here = place.joined_at, tl.left_at(run, place, until)
                for kind, times in parts_of[fragment.key].items():
                    shown = colour, kind, fragment.trainer
                    add(shown, run.id, place.name, tl.clip(times, *here), 0.16)
    for (colour, kind, name), drawn in boxes.items():
        title = f'{name}, {kind}' if kind else name
        chart.boxes(_joined(drawn, clock.length / MOST_MOMENTS), f'{colour} {kind}'.strip(), title)
    for run in history.runs:
        for node in tl.struck_nodes(run):
            at = clock.of(run.id, tl.left_at(run, node, clock.until[run.id]))
            chart.cross(at, 1 - (row[node.name] + 0.5) / len(names), f'{node.name} was taken')
    every = -(-len(names) // 24)
    for name in names[::every]:
        chart.row((row[name] + 0.5) / len(names), name if len(name) <= 8 else '…' + name[-7:])
    _joints(chart, found)
    return chart.svg()


def _joined(boxes: Sequence[Box], least: float) -> list[Box]:
    """Boxes of one kind; those of a row less than ``least`` apart (no visible gap) are joined."""
    joined: list[Box] = []
    for box in sorted(boxes, key=lambda box: (box[2], box[0])):
        if joined and joined[-1][2] == box[2] and box[0] - joined[-1][1] < least:
            joined[-1] = (joined[-1][0], max(joined[-1][1], box[1]), *box[2:])
        else:
            joined.append(box)
    return joined


def losses(
    trainer: str, loss: Losses, kind: str, found: Figures
) -> list[tuple[str, Markup | None]]:
    """Over samples and over time, with titles; None where no loss was reported."""
    points = [p for line in loss.fragments for p in line]
    charts: list[tuple[str, Markup | None]] = []
    for over in ('samples', 'time'):
        title, of_time = f'{loss.name} over {over}', over == 'time'
        if not points:
            charts.append((title, None))
            continue
        x = seconds(found.clock.length) if of_time else linear(0, max(p.samples for p in points))
        y = _value_axis([p.value for p in points])
        chart = Chart(x, y, f'{loss.name} of {trainer} over {over}', 'low')
        for i, line in enumerate(loss.fragments):
            part = f'{trainer}, part {i + 1} of {len(loss.fragments)}'
            chart.line([(p.seconds if of_time else p.samples, p.value) for p in line], kind, part)
        for samples, at_s in loss.preempted:
            where = f'at {number(samples)} samples', f'after {duration(at_s)}'
            said = f'preempted {", ".join(reversed(where) if of_time else where)}'
            chart.upright(at_s if of_time else samples, 'preempted', said, behind=True)
        if of_time:
            _joints(chart, found)
        charts.append((title, chart.svg()))
    return charts


def metric(
    name: str, curves: Mapping[str, Sequence[CurvePoint]], view: MetricView, found: Figures
) -> Markup | None:
    """One metric of all trainers; None where it has no values on this axis."""
    lines = {trainer: view.line(curve) for trainer, curve in curves.items()}
    values = [value for line in lines.values() for _, value in line]
    if not values:
        return None
    longest = max(x for line in lines.values() for x, _ in line)
    x = seconds(found.clock.length) if view.axis == 'seconds' else linear(0, longest)
    chart = Chart(x, _value_axis(values), f'{name} over {view.axis}', 'low')
    of = kinds(found)
    for trainer, line in lines.items():
        kind = of.get(trainer, 'others')
        for at in line if len(line) <= MOST_DOTS else ():
            chart.dot(at, kind, f'{trainer}: {name} {number(at[1])}')
        if view.smooth:
            chart.line(line, f'{kind} raw', trainer)
        chart.line(smoothed(line, view.smooth) if view.smooth else line, kind, trainer)
    if view.axis == 'seconds':
        _joints(chart, found)
    return chart.svg()


def scaling(learned: MeasuredScaling, kind: str) -> Markup | None:
    points = [*learned.curve, *((n, rate) for n, rate, _ in learned.measured)]
    if not points:
        return None
    x = linear(0, max(n for n, _ in points), whole=True)
    y = linear(0, max(rate for _, rate in points) or 1.0)
    chart = Chart(x, y, f'samples per second of {learned.trainer} over nodes', 'low')
    name = 'the stated curve, scaled' if learned.stated else 'the learned curve'
    chart.line([(0, 0.0), *learned.curve], f'{kind} thin', name)
    for n, rate, count in learned.measured:
        speed = f'{number(rate)} samples/s on {nodes_text(n)}'
        times = f'{count} {"fragment" if count == 1 else "fragments"}'
        chart.dot((n, rate), kind, f'measured: {speed}, median, in {times}')
    return chart.svg()


def predicted_and_actual(found: Figures) -> Markup | None:
    of = kinds(found)
    known = [(o, o.expected) for o in found.outcomes if o.expected is not None]
    pairs = [(o, expected, o.trained) for o, expected in known if expected >= 1]
    if not pairs:
        return None
    values = [v for _, expected, trained in pairs for v in (expected, trained) if v >= 1]
    low, high = min(values), max(values)
    x, y = logarithmic(low, high), logarithmic(low, high)
    label = 'decisions: samples as predicted, to the right, and as trained, upwards'
    chart = Chart(x, y, f'{len(pairs)} {label}', 'middle')
    chart.line([(x.low, y.low), (x.high, y.high)], 'equal', 'as predicted')
    for outcome, expected, trained in pairs:
        chart.dot(
            (expected, max(trained, low)),
            of.get(outcome.trainer, 'others'),
            f'{outcome.trainer}, {outcome.nodes_before} to {nodes_text(outcome.nodes)} for '
            f'{duration(outcome.until - outcome.at)}: '
            f'predicted {number(expected)} samples, trained {number(trained)}',
        )
    return chart.svg()


def _value_axis(values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if low < 0:
        return linear(low, high)
    # A value of 0 is drawn at the lower end of the logarithmic axis.
    smallest = max(min((v for v in values if v > 0), default=high), 1e-6 * high)
    return logarithmic(smallest, high) if high > 30 * smallest else linear(0.0, high)


def _joints(chart: Chart, found: Figures) -> None:
    for at in found.clock.joints:
        chart.upright(at, 'joint', 'the next run begins')
