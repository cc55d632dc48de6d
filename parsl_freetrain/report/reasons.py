"""Explains a trainer's nodes from data of the ledger; reads no files and solves no problems."""

from collections.abc import Mapping
from typing import Any

from parsl_freetrain.core.allocation.constraints import KEPT_FREE
from parsl_freetrain.core.allocation.explain import Reason
from parsl_freetrain.core.allocation.problem import problem_in, relative_gap
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import nodes_text as nodes
from parsl_freetrain.core.model.state import RunState, Training
from parsl_freetrain.core.model.types import in_need
from parsl_freetrain.report.outcome import DecisionOutcome

REFUSAL_S = 600.0  # maximum age in seconds of a site's refusal that is still relevant
MOST_OTHERS = 5

TRIGGERS = {
    'NodesJoined': 'nodes joined',
    'NodesLeft': 'nodes left',
    'NodesNeeded': 'waiting jobs of others need nodes',
    'BlockClosed': 'a block ended',
    'BlockEndKnown': 'the end of a block became known',
    'TrainerSubmitted': 'a trainer was submitted',
    'TotalKnown': 'the length of a training became known',
    'RoundKnown': 'the length of a round became known',
    'ReplicaReached': 'a replica in another executor went on',
    'FragmentProgressed': 'a trainer made progress',
    'FragmentEnded': 'a fragment ended',
    'TrainerCancelled': 'a trainer was cancelled',
    'OrdinaryWork': 'ordinary Parsl tasks came or went',
    'Tick': 'time went by',
    'BudgetSpent': 'a budget was spent',
}
"""The triggers of decisions in words."""


def decision_about(
    name: str,
    decided: ev.Decided,
    now: float,
    reason: Reason | None = None,
    outcome: DecisionOutcome | None = None,
) -> dict[str, Any]:
    """A decision from the view of one trainer, with its outcome, and the ``reason`` if the problem
    could be solved again; None: not recorded, or not known. Worths: for the horizon, objective x
    seconds; ``gap``: the share of it by which a better decision could be better, at most.
    """
    before, document, other = decided.current.get(name, 0), decided.document, None
    if reason is not None and reason.alternative is not None:
        other = {'nodes': reason.alternative.nodes, 'worse_by': reason.alternative.worse_by}
    # Not where the trainer was about to start on nodes from an earlier decision.
    compared = outcome is not None and outcome.nodes_before == before
    return {
        'ago_s': max(0.0, now - decided.at),  # it may have come after ``now`` was taken
        'trigger': decided.trigger,
        'nodes': decided.nodes,
        'nodes_before': before,
        'nodes_after': decided.allocation.get(name, 0),
        'status': decided.status,
        'solver': decided.solver,
        'staying': decided.staying,
        'objective': decided.objective,
        'others': {k: n for k, n in decided.allocation.items() if n and k != name},
        'actions': [describe(action) for action in decided.actions],
        'horizon_s': document['horizon_s'] if reason and document else None,
        'worth_before': reason and reason.worth_before,
        'worth': reason and reason.worth,
        'rescale_cost': reason and reason.rescale_cost,
        'alternative': other,
        'stood_s': outcome and outcome.until - outcome.at,
        'expected': outcome and outcome.expected,
        'staying_expected': outcome.staying if outcome and compared else None,
        'trained': outcome and outcome.trained,
        'gap': relative_gap(decided.objective, decided.bound),
    }


def describe(action: ev.Action) -> str:
    match action:
        case ev.OpenBlock(request):
            on_class = f' on {request.node_class}' if request.node_class else ''
            return f'open a block of {nodes(request.nodes)}{on_class}'
        case ev.CloseBlock(block, why):
            return f'close block {block}: {why}'
        case ev.ReleaseNodes(block, given, why):
            return f'give {nodes(len(given))} of block {block} back: {why}'
        case ev.StartFragment(trainer, fragment, on):
            return f'start fragment {fragment} of {trainer!r} on {nodes(len(on))}'
        case ev.StopFragment(trainer, fragment, why):
            return f'stop fragment {fragment} of {trainer!r}: {why}'
        case ev.AbandonFragment(trainer, fragment):
            return f'abandon fragment {fragment} of {trainer!r}: some of its nodes are gone'
        case ev.EndTrainer(trainer, state, why):
            return f'end {trainer!r}: {state}{f", {why}" if why else ""}'


def _made(training: Training) -> str:
    by = training.weights_by
    return '' if by is None else f' The last outer step was made by replica {by}.'


def waits_for(run: RunState, training: Training, now: float) -> str | None:
    """A sentence on what a trainer of a live run waits for; None if it has nodes or has ended."""
    fragment = training.last()
    if training.over or (fragment is not None and fragment.ended is None):
        return None
    each = {one.name: one.rounds for one in run.replicas(training) if not one.over}
    each |= run.rounds_elsewhere(training)
    if late := [name for name, rounds in each.items() if rounds < training.rounds_needed]:
        return (
            f'It waits at the end of round {training.rounds} for {len(late)} other replicas: '
            f'{", ".join(late[:MOST_OTHERS])}.{_made(training)}'
        )
    if all(node.left_at is not None for node in run.nodes.values()):
        return _for_nodes(run, now) + _given_back(run, now)
    last = run.decisions[-1] if run.decisions else None
    if last is None or last.at < training.submitted.at:
        return 'It waits for the next decision.'
    if training.name not in last.allocation:
        turn = ', '.join(last.allocation) or 'none'
        return f'It waits for its turn: few train at a time (trainers_at_a_time). Now: {turn}.'
    if last.allocation[training.name]:
        return (
            f'It will get {nodes(last.allocation[training.name])} as soon as the trainers that '
            'use them have stopped.'
        )
    fewest = training.trainer.min_nodes
    if last.nodes < fewest:
        return (
            f'It waits for more nodes: it needs {fewest} at least, and there '
            f'{"is" if last.nodes == 1 else "are"} {last.nodes}.'
        )
    others = shares({k: n for k, n in last.allocation.items() if n})
    limit = _limit(training.name, fewest, last)
    if limit is not None:
        return (
            f'It waits because {limit}, and it needs {fewest} at least; now these have '
            f'nodes: {others or "none"}.'
        )
    return f"It waits because others do more with the pool's {nodes(last.nodes)}: {others}."


def _limit(name: str, fewest: int, decided: ev.Decided) -> str | None:
    """The limit that keeps a trainer from free nodes; None: none, or it was not recorded."""
    given, document = decided.allocation, decided.document
    if document is None or sum(given.values()) + fewest > decided.nodes:
        return None
    problem = problem_in(document)
    for limit in problem.limits:
        members = limit.members or tuple(given)
        held = sum(given.get(other, 0) for other in members)
        if limit.most is None or name not in members or held + fewest <= limit.most:
            continue
        if limit.why == KEPT_FREE:
            free = nodes(problem.nodes - limit.most)
            return f"{free} of the pool's {decided.nodes} are kept free"
        if limit.members:
            return f'no more than {nodes(limit.most)} may go to {limit.why} at once'
        return f'the executor uses no more than {nodes(limit.most)} at once'
    return None


def _for_nodes(run: RunState, now: float) -> str:
    asked = [b.opened.request.nodes for b in run.blocks.values() if b.closed_at is None]
    if asked:
        which = 'a block' if len(asked) == 1 else f'{len(asked)} blocks'
        return (
            f'It waits for nodes: {which} with {nodes(sum(asked))} '
            f'{"is" if len(asked) == 1 else "are"} asked for and not ready yet.'
        )
    if run.refused and now - run.refused[-1].at < REFUSAL_S:
        last = run.refused[-1]
        return (
            f'It waits for nodes: the site refused a block of {nodes(last.nodes)} '
            f'{now - last.at:.0f} s ago: {last.error}'
        )
    return 'It waits for a hole: the site offers no nodes now, or not for long enough.'


def _given_back(run: RunState, now: float) -> str:
    if run.needed is None or now - run.needed.at >= REFUSAL_S:
        return ''
    others = in_need(demand.job for demand in run.needed.demands)
    return f' {now - run.needed.at:.0f} s ago nodes were given back for others: {others}.'


def in_words(name: str, about: Mapping[str, Any]) -> list[str]:
    trigger = ', '.join(TRIGGERS.get(word, word) for word in about['trigger'].split('+'))
    before = f'goes from {about["nodes_before"]} to'
    verb = 'keeps' if about['nodes_before'] == about['nodes_after'] else before
    change = f'{name!r} {verb} {nodes(about["nodes_after"])}'
    others = shares(about['others'])
    count = about['nodes']
    lines = [
        f'{trigger}; there {"is" if count == 1 else "are"} {nodes(count)} to give away. '
        f'{change}{f"; {others}" if others else ""}.'
    ]
    gain, quality = about['objective'] - about['staying'], about['status']
    if about['gap'] and quality == 'feasible':
        quality = f'within {100 * about["gap"]:.2g} % of the optimum'
    horizon = '' if about['horizon_s'] is None else f' over the next {about["horizon_s"]:g} s'
    lines.append(
        f'In all this is worth {_number(about["objective"])}{horizon}, '
        + (
            f'{_number(gain)} more than changing nothing'
            if gain > 0
            else 'and no change is worth more'
        )
        + f' ({quality}, by {about["solver"]}).'
    )
    if about['worth'] is not None and about['worth_before'] is not None:
        own = f'To {name!r} it is worth {_number(about["worth"])}'
        if about['nodes_before'] != about['nodes_after']:
            own += f', keeping what it had {_number(about["worth_before"])}'
        other = about['alternative']
        if other is None:
            own += '; there is no way to give it another number of nodes.'
        elif other['worse_by'] == 0:
            own += f'; {nodes(int(other["nodes"]))} for it would be as good.'
        else:
            own += (
                f'; its next best choice is {nodes(int(other["nodes"]))}; all trainers together '
                f'would then be worth {_number(other["worse_by"])} less.'
            )
        lines.append(own)
    if about['stood_s'] and (about['nodes_after'] or about['trained']):
        lines.append(_what_became(name, about))
    return lines


def _what_became(name: str, about: Mapping[str, Any]) -> str:
    trained = f'{name!r} trained {_count(about["trained"] or 0)} that it kept'
    held_s = f'{about["stood_s"]:.0f}' if (about['stood_s'] or 0.0) >= 0.5 else 'less than 1'
    stood = f'It was in force for {held_s} s'
    if about['expected'] is None:
        return f'{stood}. What to expect was not known yet; {trained}.'
    staying = ''
    if about['staying_expected'] is not None and about['nodes_before'] != about['nodes_after']:
        staying = f'; without a change: {_count(about["staying_expected"])}'
    return f'{stood}. Expected: {_count(about["expected"])}{staying}; {trained}.'


def _count(samples: float) -> str:
    return '1 sample' if round(samples) == 1 else f'{round(samples):,} samples'


def shares(allocation: Mapping[str, int]) -> str:
    ranked = sorted(allocation.items(), key=lambda item: -item[1])
    shown = ', '.join(f'{name!r} {count}' for name, count in ranked[:MOST_OTHERS])
    return f'{shown} and {len(ranked) - MOST_OTHERS} more' if len(ranked) > MOST_OTHERS else shown


def _number(value: float) -> str:
    return f'{value:.4g}' if abs(value) < 1e6 else f'{value:.3e}'
