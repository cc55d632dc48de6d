"""Whether a pipeline's schedule can be run, how long it takes, and what it keeps in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parsl_freetrain.training.parallel.pipeline import schedule as sc
from parsl_freetrain.training.parallel.pipeline.schedule import (
    StageTransfer,
    Step,
    message_of,
    programs_of,
)

RUN, POST, SEND, WAIT = 'run', 'post', 'send', 'wait'


def faults(schedule: sc.PipelineSchedule) -> tuple[str, ...]:
    """Sentences that say why a schedule cannot be run; empty if it can: if each micro-batch passes
    each stage forward and backward once, at the worker that has the stage, after the tasks that it
    depends on; if no worker waits for ever even if sending waits for the receiver; and if both
    workers that have a stage complete it in the same slot.
    """
    at = {task: slot for row in schedule.rows for slot, task in enumerate(row) if task is not None}
    found = [
        f'{task} is at worker {worker}, which does not have the stage.'
        for worker, row in enumerate(schedule.rows)
        for task in row
        if task is not None and worker != schedule.worker(task.stage, task.direction)
    ]
    every = Counter(task for row in schedule.rows for task in row if task is not None)
    found += [f'{task} is there {times} times.' for task, times in every.items() if times > 1]
    directions: dict[int, set[int]] = {m: set() for m in range(schedule.micro_batches)}
    for task in at:
        directions.setdefault(task.micro_batch, set()).add(task.direction)
    for m, ways in directions.items():
        if len(ways) != 1:
            found.append(f'Micro-batch {m} goes in {len(ways)} directions.')
        passes = [
            (kind, stage) for kind in (sc.FORWARD, sc.BACKWARD) for stage in range(schedule.stages)
        ]
        needed = [sc.Task(kind, stage, m, way) for way in ways for kind, stage in passes]
        found += [f'{task} is missing.' for task in needed if task not in at]
    for task, slot in at.items():
        before = [schedule.fed_by(task)]
        if task.kind == sc.BACKWARD:
            before.append(sc.Task(sc.FORWARD, task.stage, task.micro_batch, task.direction))
        found += [
            f'{task} in slot {slot} is not after {other} in slot {at[other]}.'
            for other in before
            if other in at and at[other] >= slot
        ]
    if not found:
        found += [
            f'Worker {worker} waits for ever in {action}.'
            for worker, action in stuck(actions_of(schedule)).items()
        ]
        for s in range(schedule.stages):
            one, other = (_completed(schedule, s, way) for way in (sc.DOWN, sc.UP))
            if one != other and None not in (one, other):
                found.append(
                    f'Stage {s} is complete in slot {one} at one of its workers and in slot '
                    f'{other} at the other.'
                )
    return tuple(found)


def makespan(schedule: sc.PipelineSchedule, forward: float = 1.0, backward: float = 1.0) -> float:
    """Time of a batch if each worker does its tasks in the schedule's order, as early as possible,
    in the unit of ``forward`` and ``backward``, the times of a pass through a stage. Messages take
    none.
    """
    done: dict[sc.Task, float] = {}
    free = [0.0] * schedule.stages
    # In the order of slots, everything that a task depends on comes before it.
    for slot in range(schedule.slots):
        for worker, row in enumerate(schedule.rows):
            task = row[slot]
            if task is None:
                continue
            before = schedule.fed_by(task)
            start = max(free[worker], done[before] if before is not None else 0.0)
            done[task] = free[worker] = start + (forward if task.kind == sc.FORWARD else backward)
    return max(free)


def bubbles(schedule: sc.PipelineSchedule, forward: float = 1.0, backward: float = 1.0) -> float:
    """The share of all workers' time that is spent waiting, 0 to 1."""
    return 1 - schedule.micro_batches * (forward + backward) / makespan(schedule, forward, backward)


def activations(schedule: sc.PipelineSchedule) -> tuple[int, ...]:
    """By worker: maximum number of micro-batches whose activations it keeps at a time."""
    peaks = []
    for row in schedule.rows:
        kept = peak = 0
        for task in row:
            if task is not None:
                kept += 1 if task.kind == sc.FORWARD else -1
                peak = max(peak, kept)
        peaks.append(peak)
    return tuple(peaks)


def _completed(schedule: sc.PipelineSchedule, stage: int, direction: int) -> int | None:
    row = schedule.rows[schedule.worker(stage, direction)]
    last = sc.BACKWARD, stage, direction
    tasks = ((slot, task) for slot, task in enumerate(row) if task is not None)
    return max((i for i, t in tasks if (t.kind, t.stage, t.direction) == last), default=None)


@dataclass(frozen=True)
class WorkerAction:
    """One action of a worker: :data:`RUN` a task; :data:`POST` a receive; :data:`SEND` a message,
    which waits for its receive; :data:`WAIT` for a message.
    """

    verb: str
    what: sc.Task | StageTransfer


def actions_of(schedule: sc.PipelineSchedule) -> tuple[tuple[WorkerAction, ...], ...]:
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


def _actions(schedule: sc.PipelineSchedule, step: Step) -> Iterator[WorkerAction]:
    if step.task is not None:
        before = message_of(schedule, schedule.fed_by(step.task))
        if before is not None:
            yield WorkerAction(WAIT, before)
        yield WorkerAction(RUN, step.task)
    yield from (WorkerAction(POST, message) for message in step.receives)
    yield from (WorkerAction(SEND, message) for message in step.sends)
