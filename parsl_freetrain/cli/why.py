"""``freetrain why``: explains why a trainer has its nodes, or what it waits for."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from parsl_freetrain.cli.where import (
    JsonOption,
    LedgerOption,
    RunOption,
    journal_at,
    print_json,
    value,
)
from parsl_freetrain.core.allocation.explain import Reason, explain
from parsl_freetrain.core.allocation.problem import problem_in
from parsl_freetrain.core.model.errors import BadInput, clean
from parsl_freetrain.core.model.errors import nodes_text as nodes
from parsl_freetrain.core.model.events import Decided
from parsl_freetrain.core.model.state import Fragment, RunState, Training
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.learned import Speed, place_of, shapes_tried
from parsl_freetrain.report.outcome import outcomes
from parsl_freetrain.report.reasons import decision_about, in_words, waits_for
from parsl_freetrain.report.runs import chosen, life_of, trainer_named
from parsl_freetrain.report.status import state_of
from parsl_freetrain.solver import allocator_named


def why(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer.')],
    last: Annotated[int, value('N', 'Maximum number of decisions to explain.')] = 3,
    ledger: LedgerOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a trainer does or waits for, and explain the newest decision about it, and the last
    ones that changed its nodes: what was known, what was decided, and what the alternative was.
    """
    if last < 0:
        raise BadInput(f'--last is {last}; it must be a number of decisions, 0 or more.')
    found = explanation(journal_at(ledger), trainer, run, last, time.time())
    if as_json:
        print_json(found)
        return
    print('\n'.join(clean(line) for line in _lines(found)))


def explanation(
    journal: Journal, trainer: str, run: str | None, last: int, now: float
) -> dict[str, Any]:
    """What ``freetrain why`` says, as data. Raises BadInput if there is no such run or trainer."""
    history = journal.history()
    one = chosen(history, journal.path, run)
    training = one.trainers[trainer_named(one.trainers, trainer)]
    life = life_of(history, one, now)
    going = life.state in ('running', 'silent')
    newest = training.last()
    running = newest if going and newest and newest.ended is None else None
    about = [d for d in enumerate(one.decisions, 1) if trainer in d[1].allocation]
    moved = [d for d in about[:-1] if d[1].allocation[trainer] != d[1].current.get(trainer, 0)]
    decided = moved + about[-1:]
    mine = dict(reversed(decided[len(decided) - min(last, len(decided)) :]))
    found = outcomes(history.of(one.name), now, only=trainer, numbers=mine)
    became = {outcome.decision: outcome for outcome in found}
    ended = [f.ended for f in training.fragments if f.ended is not None]
    seen = running.seen.samples if running and running.seen else 0
    return {
        'trainer': trainer,
        'run': one.name,
        'run_state': life.state,
        'note': life.sentence,
        'state': state_of(training, going),
        'why': training.why,
        'samples': max(training.samples, seen),
        'total_samples': training.trainer.total_samples,
        'fragment': None if running is None else running.number,
        'nodes': 0 if running is None else len(running.nodes),
        'shape': running.shape or None if running else None,
        'shapes': [asdict(tried) for tried in shapes_tried(training.fragments)],
        'memory': _memory(training),
        'short_of_memory_on': sorted(
            {len(f.nodes) for f in training.fragments if f.ended and f.ended.out_of_memory}
        ),
        'since_s': now - (training.state_at if running is None else running.launched.at),
        'waits_for': waits_for(one, training, now) if going else None,
        'speed': _speed(one, training, running),
        'pauses': {
            'more' if event.after > event.before else 'fewer': event.seconds
            for event in training.rescaled
        },
        'last_failure': next((event.error for event in reversed(ended) if event.error), ''),
        'decisions': [
            decision_about(trainer, d, now, _reason(d, trainer), became.get(number))
            for number, d in mine.items()
        ],
    }


def _memory(training: Training) -> dict[str, int]:
    """By node count, the most memory in bytes that a rank of the trainer's fragments needed."""
    found: dict[int, int] = {}
    for fragment in training.fragments:
        if fragment.ended and (size := fragment.ended.memory):
            found[len(fragment.nodes)] = max(found.get(len(fragment.nodes), 0), size)
    return {str(count): size for count, size in sorted(found.items())}


def _speed(run: RunState, training: Training, running: Fragment | None) -> dict[str, Any]:
    """Whether its curve was stated; samples/s by class and count, the best count; where it runs."""
    trainer = training.trainer
    speed = Speed(trainer)
    for fragment in training.fragments:
        for report in fragment.progress:
            speed.observe(place_of(run, fragment), report.rate)
    classes = {}
    for name, measured in speed.measured.items():
        curve = speed.curve(node_class=name)
        fastest = None if curve is None else max(curve.nodes, key=curve.rate_at)
        rates = {str(n): rate for n, rate in sorted(measured.items())}
        classes[name] = {'measured': rates, 'fastest': fastest}
    there = {block.opened.request.node_class for block in run.blocks.values()}
    return {
        'stated': trainer.curve is not None or bool(trainer.class_curves),
        'classes': classes,
        'on': '' if running is None else place_of(run, running)[1],
        'not_tried': sorted(there - {'', *speed.measured}),
    }


def _speed_in_words(speed: Mapping[str, Any], count: int) -> list[str]:
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
        s = 's' * (list(found['measured']) != ['1'])
        lines.append(
            f'Its speed in samples/s is known: {measured} node{s}{on_class}. Other counts follow a '
            f'model fitted to these; it should be fastest on {found["fastest"]}.'
        )
    here = speed['classes'].get(speed['on'], {'measured': {}})
    if count and str(count) not in here['measured']:
        on_class = f' of class {speed["on"]}' if speed['on'] else ''
        lines[-1] += f' {nodes(count)}{on_class} {"is" if count == 1 else "are"} being tried.'
    if speed['not_tried']:
        lines.append(
            f'It has not been measured on nodes of class {", ".join(speed["not_tried"])}: there it '
            'is assumed to be faster or slower by as much as trainers that were measured on both.'
        )
    return lines


def _reason(decided: Decided, trainer: str) -> Reason | None:
    """The reason from solving the decision's problem again; None if the result differs."""
    document = decided.document
    if document is None:
        return None
    problem = problem_in(document)
    allocator = allocator_named('auto', isolated=False)
    answer = allocator.allocate(problem)
    if answer.allocation.get(trainer) != decided.allocation[trainer]:
        return None
    [reason] = explain(problem, answer, allocator, only=trainer).reasons
    return reason


def _shapes_in_words(tried: Iterable[Mapping[str, Any]]) -> list[str]:
    by_count: dict[int, list[str]] = {}
    for one in tried:
        rate = 'not measured' if one['rate'] is None else f'{one["rate"]:.4g} samples/s'
        now = ', in use' if one['newest'] else ''
        by_count.setdefault(one['nodes'], []).append(f'{one["shape"]} ({rate}{now})')
    return [
        f'On {nodes(count)} it has tried the shapes {", ".join(shapes)}; the fastest is kept.'
        for count, shapes in by_count.items()
        if len(shapes) > 1
    ]


def _lines(found: dict[str, Any]) -> list[str]:
    name = found['trainer']
    of = f' of {found["total_samples"]:,}' if found['total_samples'] else ''
    done = f'{found["samples"]:,}{of} samples'
    if found['fragment'] is not None:
        shape = f' ({found["shape"]})' if found['shape'] else ''
        on = f'{nodes(found["nodes"])}{shape}'
        lines = [
            f'{name!r} is running: fragment {found["fragment"]} on {on}, for '
            f'{found["since_s"]:.0f} s; {done}.'
        ]
    else:
        has = 'has' if found['state'] == 'failed' else 'is'
        lines = [f'{name!r} {has} {found["state"]}, for {found["since_s"]:.0f} s; {done}.']
    why = found['why'] and f'Why: {found["why"]}'
    lines += [sentence for sentence in (why, found['waits_for'], found['note']) if sentence]
    lines += _speed_in_words(found['speed'], found['nodes'])
    lines += _shapes_in_words(found['shapes'])
    if found['memory']:
        sizes = found['memory'].items()
        most = ', '.join(f'{size / 1e9:.3g} GB on {nodes(int(n))}' for n, size in sizes)
        lines.append(f'The most memory that a rank needed: {most}.')
    if found['short_of_memory_on']:
        counts = ', '.join(map(nodes, found['short_of_memory_on']))
        lines.append(f'Memory did not suffice on {counts}.')
    took = found['pauses'].items()
    lines += [f'Its last rescale to {way} nodes paused it for {s:.2f} s.' for way, s in took]
    if failure := found['last_failure']:
        if failure != found['why']:
            lines.append(f'The last of its fragments that failed or was preempted: {failure}')
        lines.append(f'What it printed: freetrain logs {name}')
    for about in found['decisions']:
        first, *rest = in_words(name, about)
        lines += ['', f'{about["ago_s"]:.0f} s ago: {first}', *(f'  {line}' for line in rest)]
    if not found['decisions']:
        lines.append('There has been no decision about it in this run.')
    return lines
