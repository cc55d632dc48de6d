"""When trainers end: cancelled, a budget is spent, or what the end of a fragment means."""

import math
from dataclasses import replace

from parsl_freetrain.core.controller import controller_state as cs
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import nodes_text
from parsl_freetrain.core.model.types import Trainer

# A multiple of the setting 'stalls', since several holes that are too short may be bad luck.
FRUITLESS = 4
STORAGE_S = 600.0  # seconds without progress after which trouble of a file system ends a trainer


def why_it_fails(
    trainer: cs.TrainerState,
    ended: cs.FragmentState,
    event: ev.FragmentEnded,
    settings: ControllerSettings,
) -> str:
    """Why the trainer cannot go on; empty if it can. Its counts of failures are updated."""
    progressed = event.samples > ended.from_samples
    if progressed or not event.storage:
        trainer.trouble_since = math.inf
    if event.storage:
        trainer.trouble_since = min(trainer.trouble_since, event.at)
        lasts_s = event.at - trainer.trouble_since
        return '' if lasts_s < STORAGE_S else f'{event.error}; this has lasted for {lasts_s:.0f} s'
    if event.out_of_memory:
        return _short_of_memory(trainer, ended, event.error)
    if event.ending is ev.Ending.FAILED:
        trainer.errors += 1
        if event.final or trainer.errors > settings.retries:
            return event.error
    if event.ending is ev.Ending.PREEMPTED and not ended.broken and not progressed:
        trainer.stalled += 1
        if trainer.stalled >= settings.stalls:
            return (
                f'{trainer.stalled} fragments in a row died without progress though none of '
                f'their nodes was lost; the last one, fragment {event.fragment}: {event.error}'
            )
    if event.ending is ev.Ending.PREEMPTED and ended.used_up(event.at) and not progressed:
        trainer.fruitless += 1
        if trainer.fruitless >= FRUITLESS * settings.stalls:
            return (
                f'{trainer.fruitless} fragments in a row, up to fragment {event.fragment}, had '
                'their nodes until the hole ended without getting one global batch trained and '
                'saved: a step is longer than the holes; use a smaller batch_size, more nodes '
                '(min_nodes), or holes that last longer (min_hole_s)'
            )
    return ''


def _short_of_memory(trainer: cs.TrainerState, ended: cs.FragmentState, error: str) -> str:
    """Do without the shape, or else without the node count, that needs too much memory."""
    nodes = len(ended.nodes)
    if trainer.shapes.exclude(nodes, ended.shape):
        return ''
    counts = [n for p in trainer.profiles.measured.values() for n in p.measured]
    left = without(trainer.trainer, nodes, any(n < nodes for n in counts))
    if left is None:
        return (
            f'memory does not suffice on {nodes_text(nodes)}, and it has no other '
            f'count: {error}; allow more nodes (max_nodes), divide the parameters (Shape), or use '
            'a smaller micro_batch'
        )
    trainer.trainer = left
    return ''


def without(trainer: Trainer, nodes: int, trained: bool) -> Trainer | None:
    """The trainer without a count of too little memory, and fewer never trained; or None."""
    left = [n for n in trainer.counts() if (n != nodes if trained else n > nodes)]
    curves = filter(None, [trainer.curve, *dict(trainer.class_curves).values()])
    if not left or any(not any(curve.rate_at(n) > 0 for n in left) for curve in curves):
        return None
    if left[0] > nodes:
        return replace(trainer, min_nodes=left[0])
    return replace(trainer, sizes=tuple(left))


def stop_spent(state: cs.ControllerState, at: float) -> list[ev.Action]:
    """End the trainers whose budget is spent; running ones write a checkpoint."""
    actions: list[ev.Action] = []
    state.budgets.note(at)
    if not state.budgets or state.shutting_down:
        return actions
    for trainer in list(state.trainers.values()):
        if trainer.dismissed:
            continue
        smallest = 0 if trainer.running else trainer.trainer.counts()[0]
        if why := state.budgets.spent(trainer.trainer, at, smallest * state.shortest_s):
            actions += dismiss(state, trainer, 'failed', why)
    return actions


def dismiss_all(state: cs.ControllerState, why: str) -> list[ev.Action]:
    return [
        action
        for trainer in list(state.trainers.values())
        if not trainer.dismissed
        for action in dismiss(state, trainer, 'failed', why)
    ]


def dismiss(
    state: cs.ControllerState, trainer: cs.TrainerState, ending: str, why: str = ''
) -> list[ev.Action]:
    """End a trainer independently of the allocation: at once, or when its fragment has stopped."""
    name = trainer.trainer.name
    state.dismiss(ev.EndTrainer(name, ending, why))
    if trainer.running is None:
        return end_trainer(state, trainer, ending, why)
    return list(state.ask_to_stop(name, why or ending))


def end_trainer(
    state: cs.ControllerState, trainer: cs.TrainerState, ending: str, why: str = ''
) -> list[ev.Action]:
    """End a trainer now; the other replicas of its training cannot go on without it."""
    spec = trainer.trainer
    state.remove(spec.name)
    actions: list[ev.Action] = [ev.EndTrainer(spec.name, ending, why)]
    if ending == 'finished':
        state.open_gates(spec.training)
        return actions
    because = f'its replica {spec.name!r} has ended: {why}' if why else ''
    others = [one for one in state.siblings(spec) if not one.dismissed]
    for one in others:  # each ends itself only
        one.dismissed = ev.EndTrainer(one.trainer.name, ending, because)
    return actions + [action for one in others for action in dismiss(state, one, ending, because)]
