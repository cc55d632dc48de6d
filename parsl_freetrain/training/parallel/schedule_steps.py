"""What each worker of a pipeline does in which order: compute, then exchange what was made in the same slot.

Behind each slot, every worker begins to receive what others have made for it in that slot, and sends what it has made itself. So messages
between two workers are sent and received in the same order, whatever the schedule, and need no labels. Receiving begins before the same
worker sends, so nobody waits for ever, even if sending waits for the receiver: what is exchanged behind a slot depends
on earlier slots only. :func:`stuck` shows it for a schedule at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parsl_freetrain.training.parallel.schedule import BACKWARD, PipelineSchedule, Task

RUN, POST, SEND, WAIT = 'run', 'post', 'send', 'wait'


@dataclass(frozen=True)
class Message:
    """What a task has made (activations, or their gradients) on its way to the neighbouring stage.

    Attributes
    ----------
    task
        What made it.
    source, target
        Workers.
    """

    task: Task
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """One slot of a worker that has something to do in it.

    Attributes
    ----------
    task
        What is computed; None: nothing.
    receives, sends
        What is exchanged behind it.
    completes
        The (direction, stage) whose gradients are complete now; None: none.
    """

    task: Task | None
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    completes: tuple[int, int] | None


@dataclass(frozen=True)
class Action:
    """One thing that a worker does.

    Attributes
    ----------
    verb
        :data:`RUN` a task; :data:`POST`: say that a message can come; :data:`SEND` one, which waits for that; :data:`WAIT` for one.
    what
        The task or the message.
    """

    verb: str
    what: Task | Message


def programs_of(schedule: PipelineSchedule) -> tuple[tuple[Step, ...], ...]:
    """By worker: its steps, in the order of its slots."""
    ends = {(task.direction, task.stage): (worker, slot) for worker, row in enumerate(schedule.rows) for slot, task in enumerate(row)
            if task is not None and task.kind == BACKWARD}
    completed = {at: held for held, at in ends.items()}
    programs: list[list[Step]] = [[] for _ in schedule.rows]
    for slot in range(schedule.slots):
        made = [message for row in schedule.rows if (message := message_of(schedule, row[slot])) is not None]
        for worker, row in enumerate(schedule.rows):
            step = Step(row[slot], tuple(m for m in made if m.target == worker), tuple(m for m in made if m.source == worker),
                        completed.get((worker, slot)))
            if step.task is not None or step.receives:
                programs[worker].append(step)
    return tuple(map(tuple, programs))


def actions_of(schedule: PipelineSchedule) -> tuple[tuple[Action, ...], ...]:
    """By worker: the same, one thing after the other."""
    return tuple(tuple(action for step in program for action in _actions(schedule, step)) for program in programs_of(schedule))


def stuck(programs: Sequence[Sequence[Action]]) -> Mapping[int, Action]:
    """Which workers wait for ever, and in which action; empty if all get through.

    Parameters
    ----------
    programs
        What each worker does. Sending waits until the target has posted the message; waiting, until it was sent.
    """
    at = [0] * len(programs)
    posted: set[Message] = set()
    sent: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while at[worker] < len(program):
                action = program[at[worker]]
                if isinstance(action.what, Message):
                    if action.verb == POST:
                        posted.add(action.what)
                    elif action.what not in (posted if action.verb == SEND else sent):
                        break
                    elif action.verb == SEND:
                        sent.add(action.what)
                at[worker] += 1
                moved = True
    return {worker: program[at[worker]] for worker, program in enumerate(programs) if at[worker] < len(program)}


def message_of(schedule: PipelineSchedule, task: Task | None) -> Message | None:
    """What a task sends to another worker; None if it sends nothing."""
    taker = schedule.feeds(task) if task is not None else None
    if task is None or taker is None:
        return None
    return Message(task, schedule.worker(task.stage, task.direction), schedule.worker(taker.stage, taker.direction))


def _actions(schedule: PipelineSchedule, step: Step) -> Iterator[Action]:
    if step.task is not None:
        before = message_of(schedule, schedule.fed_by(step.task))
        if before is not None:
            yield Action(WAIT, before)
        yield Action(RUN, step.task)
    yield from (Action(POST, message) for message in step.receives)
    yield from (Action(SEND, message) for message in step.sends)
