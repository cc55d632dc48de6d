"""The steps of each worker of a pipeline in order: compute, then exchange the slot's results.

After each slot, every worker begins to receive what others have computed for it in that slot, and
sends its own result. So messages between two workers are in the same order whatever the schedule,
and need no labels. Since a worker begins to receive before it sends, and what is exchanged depends
on earlier slots only, no worker waits for ever, even if sending waits for the receiver.
"""

from __future__ import annotations

from dataclasses import dataclass

from parsl_freetrain.training.parallel.pipeline.schedule import BACKWARD, PipelineSchedule, Task


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


def message_of(schedule: PipelineSchedule, task: Task | None) -> StageTransfer | None:
    """What a task sends to another worker; None if it sends nothing."""
    taker = schedule.feeds(task) if task is not None else None
    if task is None or taker is None:
        return None
    source, target = (schedule.worker(one.stage, one.direction) for one in (task, taker))
    return StageTransfer(task, source, target)
