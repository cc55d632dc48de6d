"""Ends trainers for other reasons than the end of a fragment: cancelled, or a budget is spent."""

from __future__ import annotations

from parsl_freetrain.core.controller.controller_state import ControllerState, TrainerState
from parsl_freetrain.core.model import events as ev


def stop_spent(state: ControllerState, at: float) -> list[ev.Action]:
    """End the trainers whose budget is spent; running ones write a checkpoint."""
    actions: list[ev.Action] = []
    state.budgets.note(at)
    if not state.budgets or state.shutting_down:
        return actions
    for trainer in list(state.trainers.values()):
        if trainer.dismissed:
            continue
        smallest = 0 if trainer.running else trainer.trainer.counts()[0]
        needed_node_s = smallest * state.shortest_s
        if why := state.budgets.spent(trainer.trainer, at, needed_node_s):
            actions += dismiss(state, trainer, 'failed', why)
    return actions


def dismiss_all(state: ControllerState, why: str) -> list[ev.Action]:
    """Let all trainers fail."""
    return [
        action
        for trainer in list(state.trainers.values())
        if not trainer.dismissed
        for action in dismiss(state, trainer, 'failed', why)
    ]


def dismiss(
    state: ControllerState, trainer: TrainerState, ending: str, why: str = ''
) -> list[ev.Action]:
    """End a trainer independently of the allocation: at once, or when its fragment has stopped."""
    name = trainer.trainer.name
    state.dismiss(ev.EndTrainer(name, ending, why))
    if trainer.running is None:
        return [end_trainer(state, trainer, ending, why)]
    if trainer.running.stopping or trainer.running.broken:
        return []
    state.stop(name, trainer.running)
    return [ev.StopFragment(name, trainer.running.number, why or ending)]


def end_trainer(
    state: ControllerState, trainer: TrainerState, ending: str, why: str = ''
) -> ev.EndTrainer:
    """Forget a trainer that has no fragment any more."""
    state.remove(trainer.trainer.name)
    return ev.EndTrainer(trainer.trainer.name, ending, why)
