"""The actions of each worker of a pipeline in order: compute, then exchange the slot's results.

After each slot, every worker begins to receive what others have computed for it in that slot, and
sends its own result. So messages between two workers are in the same order whatever the schedule,
and need no labels. Since a worker begins to receive before it sends, and what is exchanged depends
on earlier slots only, no worker waits for ever, even if sending waits for the receiver;
:func:`stuck` checks that for a given schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parsl_freetrain.training.parallel.pipeline.schedule import BACKWARD, PipelineSchedule, Task

RUN, POST, SEND, WAIT = 'run', 'post', 'send', 'wait'


@dataclass(frozen=True)
class StageTransfer:
    """The result of a task (activations or their gradients), on its way to another worker."""

    task: Task
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """One slot of a worker in which it does something: the task to compute, the messages to
    exchange after it, and the (direction, stage) whose gradients are complete then.
    """

    task: Task | None
    receives: tuple[StageTransfer, ...]
    sends: tuple[StageTransfer, ...]
    completes: tuple[int, int] | None


@dataclass(frozen=True)
class WorkerAction:
    """One action of a worker: :data:`RUN` a task; :data:`POST` a receive; :data:`SEND` a message,
    which waits for its receive; :data:`WAIT` for a message.
    """

    verb: str
    what: Task | StageTransfer


def programs_of(schedule: PipelineSchedule) -> tuple[tuple[Step, ...], ...]:
    """By worker: its steps, in order of slots."""
    ends = {
        (task.direction, task.stage): (worker, slot)
        for worker, row in enumerate(schedule.rows)
        for slot, task in enumerate(row)
        if task is not None and task.kind == BACKWARD
    }
    completed = {at: held for held, at in ends.items()}
    programs: list[list[Step]] = [[] for _ in schedule.rows]
    for slot in range(schedule.slots):
        sent = (message_of(schedule, row[slot]) for row in schedule.rows)
        made = [message for message in sent if message is not None]
        for worker, row in enumerate(schedule.rows):
            step = Step(
                row[slot],
                tuple(m for m in made if m.target == worker),
                tuple(m for m in made if m.source == worker),
                completed.get((worker, slot)),
            )
            if step.task is not None or step.receives:
                programs[worker].append(step)
    return tuple(map(tuple, programs))


def actions_of(schedule: PipelineSchedule) -> tuple[tuple[WorkerAction, ...], ...]:
    """By worker: its actions, in order."""
    return tuple(
        tuple(action for step in program for action in _actions(schedule, step))
        for program in programs_of(schedule)
    )


def stuck(programs: Sequence[Sequence[WorkerAction]]) -> Mapping[int, WorkerAction]:
    """The workers that wait for ever, and in which action; empty if all finish. Sending waits until
    the target has posted the receive, waiting until the message was sent.
    """
    at = [0] * len(programs)
    posted: set[StageTransfer] = set()
    sent: set[StageTransfer] = set()
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while at[worker] < len(program):
                action = program[at[worker]]
                if isinstance(action.what, StageTransfer):
                    if action.verb == POST:
                        posted.add(action.what)
                    elif action.what not in (posted if action.verb == SEND else sent):
                        break
                    elif action.verb == SEND:
                        sent.add(action.what)
                at[worker] += 1
                moved = True
    left = ((worker, program[at[worker] :]) for worker, program in enumerate(programs))
    return {worker: actions[0] for worker, actions in left if actions}


def message_of(schedule: PipelineSchedule, task: Task | None) -> StageTransfer | None:
    """What a task sends to another worker; None if it sends nothing."""
    taker = schedule.feeds(task) if task is not None else None
    if task is None or taker is None:
        return None
    source, target = (schedule.worker(one.stage, one.direction) for one in (task, taker))
    return StageTransfer(task, source, target)


def _actions(schedule: PipelineSchedule, step: Step) -> Iterator[WorkerAction]:
    if step.task is not None:
        before = message_of(schedule, schedule.fed_by(step.task))
        if before is not None:
            yield WorkerAction(WAIT, before)
        yield WorkerAction(RUN, step.task)
    yield from (WorkerAction(POST, message) for message in step.receives)
    yield from (WorkerAction(SEND, message) for message in step.sends)
