"""``freetrain why``: explains why a trainer has its nodes, or what it waits for."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, RunOption, ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.names import run_named, trainer_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from parsl_freetrain.core.allocation.explain import Reason
    from parsl_freetrain.ledger.reader import Reader
    from parsl_freetrain.ledger.rows import FragmentRow, ProgressRow, RunHistory
    from parsl_freetrain.report.shape_speeds import ShapeTried

LOOK_BACK = 500
"""Maximum number of decisions to search for those about the trainer."""


def why(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer.')],
    last: Annotated[
        int, typer.Option(metavar='N', help='Number of decisions to explain, newest first.')
    ] = 3,
    ledger: LedgerOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a trainer does or waits for, and explain the last decisions about it.

    For each: what was known, what was decided, and what the alternative was.
    """
    from parsl_freetrain.ledger.reader import Reader
    from parsl_freetrain.report.cells import clean  # imported here, so that --help is fast

    if last < 0:
        raise BadInput(f'--last is {last}; it must be a number of decisions, 0 or more.')
    with Reader(ledger_at(ledger)) as reader:
        found = explanation(reader, trainer, run, last, time.time())
    if as_json:
        print(json.dumps(found))
        return
    print('\n'.join(clean(line) for line in _lines(found)))


def explanation(
    reader: Reader, trainer: str, run: str | None, last: int, now: float
) -> dict[str, Any]:
    """The output of ``freetrain why`` as data. Raises BadInput if there is no such run, or no such
    trainer in it.
    """
    from parsl_freetrain.ledger.rows import FINAL_STATES
    from parsl_freetrain.report.costs import MEASURED
    from parsl_freetrain.report.life import life_of
    from parsl_freetrain.report.outcome import outcomes
    from parsl_freetrain.report.reasons import decision_about, running_fragment, waits_for
    from parsl_freetrain.report.shape_speeds import USED, shape_of, shapes_tried

    history = reader.history()
    name = run_named([r.name for r in history.runs], run)
    if not history.runs:
        raise BadInput(f'The ledger {reader.path} has no run yet.')
    chosen = next((r for r in history.runs if r.name == name), history.runs[-1])
    rows = {t.name: t for t in history.trainers if t.run == chosen.id}
    row = rows[trainer_named(rows, trainer)]
    life = life_of(history, chosen, reader.about(chosen), now)
    decisions = reader.recent_decisions(chosen, LOOK_BACK)
    refusals = reader.recent_events(chosen, ['BlockRefused'], 1)
    needs = reader.recent_events(chosen, ['NodesNeeded'], 1)
    going = life.state in ('running', 'silent')
    running = running_fragment(history, row) if going else None
    mine = [d for d in decisions if trainer in d['allocation']][:last]
    progress = reader.progress(chosen.name, trainer)
    became = {
        o.decision: o
        for o in outcomes(
            reader.history(chosen.name),
            progress,
            reader.events(chosen.name, MEASURED, trainer),
            decisions[::-1],
            now,
            only=trainer,
            ids={d['id'] for d in mine},
        )
    }
    used = reader.events(chosen.name, [USED], trainer)
    timed = reader.events(chosen.name, ['FragmentTimed'], trainer)
    mine_on = {
        f.fragment: len(f.nodes)
        for f in history.fragments
        if f.run == chosen.id and f.trainer == trainer
    }
    over = not going and row.state not in FINAL_STATES
    return {
        'trainer': trainer,
        'run': chosen.name,
        'run_state': life.state,
        'note': life.sentence,
        'state': 'interrupted' if over else row.state,
        'why': row.why,
        'samples': max(row.samples, (running.seen_samples or 0) if running else 0),
        'total_samples': row.total_samples,
        'fragment': None if running is None else running.fragment,
        'nodes': 0 if running is None else len(running.nodes),
        'shape': None if running is None else shape_of(used, running),
        'shapes': [asdict(one) for one in shapes_tried(history, used, progress, timed)],
        'memory': _memory(timed, mine_on),
        'short_of_memory_on': sorted(
            {
                mine_on[e['fragment']]
                for e in reader.events(chosen.name, ['FragmentEnded'], trainer)
                if e['detail'].get('out_of_memory') and e['fragment'] in mine_on
            }
        ),
        'since_s': now - (row.state_at if running is None else running.decided_at),
        'waits_for': waits_for(history, chosen, row, decisions, refusals, now, needs)
        if going
        else None,
        'speed': _speed(row.spec, progress, history, running),
        'pauses': _pauses(reader.recent_events(chosen, ['Rescaled'], LOOK_BACK), trainer),
        'last_failure': next(
            (
                f.error
                for f in reversed(history.fragments)
                if f.trainer == trainer and f.run == chosen.id and f.error
            ),
            '',
        ),
        'decisions': [
            asdict(decision_about(trainer, d, now, _reason(d, trainer), became.get(d['id'])))
            for d in mine
        ],
    }


def _memory(events: list[dict[str, Any]], nodes: Mapping[int, int]) -> dict[str, int]:
    """By node count, the most memory in bytes that a rank of the trainer's fragments needed."""
    found: dict[int, int] = {}
    for event in events:
        count, size = nodes.get(event['fragment'] or 0), event['detail'].get('memory', 0)
        if count and size:
            found[count] = max(found.get(count, 0), size)
    return {str(count): size for count, size in sorted(found.items())}


def _speed(
    spec: Mapping[str, Any],
    reports: Iterable[ProgressRow],
    history: RunHistory,
    running: FragmentRow | None,
) -> dict[str, Any]:
    """What is known of a trainer's speed in samples per second: whether its curve was stated, and
    by node class the typical rate by measured count, and the count at which it is expected to be
    fastest; and the node class on which it runs.
    """
    from parsl_freetrain.report.speed import Speed, places_of

    speed, places = Speed(spec), places_of(history)
    for report in reports:
        key = report.run, report.trainer, report.fragment
        speed.observe(places.get(key, (0, '')), report.rate)
    classes = {}
    for name, measured in speed.measured.items():
        curve = speed.curve(node_class=name)
        classes[name] = {
            'measured': {str(n): rate for n, rate in sorted(measured.items())},
            'fastest': None if curve is None else max(curve.nodes, key=curve.rate_at),
        }
    return {
        'stated': speed.stated is not None or 'classes' in spec,
        'classes': classes,
        'on': '' if running is None else places[running.key][1],
        'not_tried': sorted({b.node_class for b in history.blocks} - {'', *speed.measured}),
    }


def _speed_in_words(speed: Mapping[str, Any], nodes: int) -> list[str]:
    if speed['stated']:
        return ['Its scaling curve was stated; decisions use it whatever is measured.']
    if not speed['classes']:
        return [
            'Its speed has not been measured yet; it is assumed to scale as trainers of its '
            'function do, or as most do.'
        ]
    lines = []
    for name, found in speed['classes'].items():
        on_class = f' of class {name}' if name else ''
        measured = ', '.join(f'{rate:.4g} on {n}' for n, rate in found['measured'].items())
        lines.append(
            f'Its speed in samples/s is known: {measured} nodes{on_class}. Other counts follow a '
            f'model fitted to these; it should be fastest on {found["fastest"]}.'
        )
    here = speed['classes'].get(speed['on'], {'measured': {}})
    if nodes and str(nodes) not in here['measured']:
        on_class = f' of class {speed["on"]}' if speed['on'] else ''
        lines[-1] += f' {nodes} nodes{on_class} are being tried.'
    if speed['not_tried']:
        lines.append(
            f'It has not been measured on nodes of class {", ".join(speed["not_tried"])}: there it '
            'is assumed to be faster or slower by as much as trainers that were measured on both.'
        )
    return lines


def _pauses(events: list[dict[str, Any]], trainer: str) -> dict[str, float]:
    """Seconds of the pause in the last rescale to 'more' and to 'fewer' nodes, if there were
    any.
    """
    found: dict[str, float] = {}
    for event in events:
        if event['trainer'] == trainer:
            change = event['detail']
            found.setdefault(
                'more' if change['after'] > change['before'] else 'fewer', change['seconds']
            )
    return found


def _reason(decision: dict[str, Any], trainer: str) -> Reason | None:
    """The reason from solving the decision's problem again; None if the result differs."""
    if decision['problem'] is None:
        return None
    from parsl_freetrain.core.allocation.explain import explain
    from parsl_freetrain.core.allocation.problem import problem_in
    from parsl_freetrain.solver import allocator_named

    problem = problem_in(decision['problem'])
    allocator = allocator_named('auto', isolated=False)
    answer = allocator.allocate(problem)
    if answer.allocation.get(trainer) != decision['allocation'][trainer]:
        return None
    [reason] = explain(problem, answer, allocator, only=trainer).reasons
    return reason


def _shapes_in_words(tried: Iterable[ShapeTried]) -> list[str]:
    from parsl_freetrain.report.shape_speeds import compared

    by_count: dict[int, list[str]] = {}
    for one in compared(tried):
        rate = 'not measured' if one.rate is None else f'{one.rate:.4g} samples/s'
        now = ', in use' if one.newest else ''
        by_count.setdefault(one.nodes, []).append(f'{one.shape} ({rate}{now})')
    return [
        f'On {count} nodes it has tried the shapes {", ".join(shapes)}; the fastest is kept.'
        for count, shapes in by_count.items()
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    from parsl_freetrain.report.reasons import DecisionAbout, in_words, nodes
    from parsl_freetrain.report.shape_speeds import ShapeTried

    name = found['trainer']
    total = found['total_samples']
    done = (
        f'{found["samples"]:,} of {total:,} samples' if total else f'{found["samples"]:,} samples'
    )
    if found['fragment'] is not None:
        shape = f' ({found["shape"]})' if found['shape'] else ''
        on = f'{nodes(found["nodes"])}{shape}'
        lines = [
            f'{name!r} is running: fragment {found["fragment"]} on {on}, for '
            f'{found["since_s"]:.0f} s; {done}.'
        ]
    else:
        because = f' because {found["why"]}' if found['why'] else ''
        lines = [f'{name!r} is {found["state"]}{because}, for {found["since_s"]:.0f} s; {done}.']
    lines += [sentence for sentence in (found['waits_for'], found['note']) if sentence]
    lines += _speed_in_words(found['speed'], found['nodes'])
    lines += _shapes_in_words([ShapeTried(**one) for one in found['shapes']])
    if found['memory']:
        most = ', '.join(f'{size / 1e9:.3g} GB on {n}' for n, size in found['memory'].items())
        lines.append(f'The most memory that a rank needed: {most} nodes.')
    if found['short_of_memory_on']:
        counts = ', '.join(map(str, found['short_of_memory_on']))
        lines.append(f'Memory did not suffice on {counts} nodes.')
    lines += [
        f'Its last rescale to {way} nodes paused it for {seconds:.2f} s.'
        for way, seconds in found['pauses'].items()
    ]
    if found['last_failure']:
        lines.append(f'Its last fragment in trouble said: {found["last_failure"]}')
        lines.append(f'What it printed: freetrain logs {name}')
    for about in found['decisions']:
        first, *rest = in_words(name, DecisionAbout(**about))
        lines += ['', f'{about["ago_s"]:.0f} s ago: {first}', *(f'  {line}' for line in rest)]
    if not found['decisions']:
        lines.append('There has been no decision about it in this run.')
    return lines
