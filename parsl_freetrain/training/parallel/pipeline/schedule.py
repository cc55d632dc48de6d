"""Schedules of pipelines: tables of which worker computes what in which slot: one pass of one
micro-batch through one of its stages (for slots of other lengths see ``makespan`` in
``workflows/pipeline_facts.py``). GPipe (Huang et al., NeurIPS 2019): all forward passes, then all
backward ones. 1F1B (Narayanan et al., SOSP 2019, with a flush after each batch as in
PipeDream-Flush): backward passes as early as possible. Chimera (Li and Hoefler, SC 2021, arXiv
2107.06925): two pipelines in opposite directions, merged so that each fills bubbles of the other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product

from parsl_freetrain.core.model.errors import BadInput

FORWARD, BACKWARD = 'F', 'B'
DOWN, UP = 0, 1


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of a micro-batch through a stage: what a worker computes in a slot."""

    kind: str  #: :data:`FORWARD` or :data:`BACKWARD`
    stage: int  # from 0, which takes the inputs, to the last, which computes the loss
    micro_batch: int
    direction: int = DOWN
    """:data:`DOWN`: worker i has stage i; :data:`UP`: the i-th worker from the end has stage i."""


@dataclass(frozen=True)
class PipelineSchedule:
    name: str
    stages: int  # number of stages, and of workers
    micro_batches: int
    rows: tuple[tuple[Task | None, ...], ...]
    """By worker, by slot: the task; None: a bubble. All rows have the makespan's length."""

    @property
    def slots(self) -> int:
        return len(self.rows[0])

    def worker(self, stage: int, direction: int) -> int:
        return stage if direction == DOWN else self.stages - 1 - stage

    def held(self, worker: int) -> tuple[tuple[int, int], ...]:
        """The (direction, stage) pairs that a worker has, sorted."""
        tasks = (task for task in self.rows[worker] if task is not None)
        return tuple(sorted({(task.direction, task.stage) for task in tasks}))

    def fed_by(self, task: Task, way: int = -1) -> Task | None:
        """The task at the neighbouring stage that makes this one's input (``way`` 1: takes its
        output); None at the end.
        """
        stage = task.stage + (way if task.kind == FORWARD else -way)
        return replace(task, stage=stage) if 0 <= stage < self.stages else None


def gpipe(stages: int, micro_batches: int) -> PipelineSchedule:
    """All forward passes, then all backward ones: 2 (N + D - 1) slots. BadInput for none."""
    turn = micro_batches + 2 * stages - 2
    return _one_way('gpipe', stages, micro_batches, lambda s, m: (s + m, turn - s + m))


def one_f_one_b(stages: int, micro_batches: int) -> PipelineSchedule:
    """Forward and backward passes alternate: 2 (N + D - 1) slots. BadInput for none."""

    def slots(s: int, m: int) -> tuple[int, int]:
        return s + m if m < stages - s else s + 2 * m, 2 * stages - 1 - s + 2 * m

    return _one_way('1f1b', stages, micro_batches, slots)


def chimera(stages: int, micro_batches: int) -> PipelineSchedule:
    """Two pipelines in opposite directions: worker w has stage w of one and D - 1 - w of the other.
    D micro-batches are a unit, half in each direction: i is in stage s forward in slot s + 2i,
    backward in 2D - 1 - s + 2i; the other direction's slots differ in parity, or are earlier or
    later. Units follow each other after 2D slots. N micro-batches take 2N + D - 2 slots, or as many
    more as the last unit lacks. Raises BadInput if the number of stages or micro-batches is odd.
    """
    _at_least_one(stages, micro_batches)
    if stages % 2:
        others = f'{stages - 1} or {stages + 1}' if stages > 1 else '2'
        raise BadInput(
            'Chimera needs an even number of stages, since worker w holds stages w and D - 1 - w, '
            f'and {stages} are asked for: use {others}, or 1F1B.'
        )
    if micro_batches % 2:
        raise BadInput(
            f'Chimera sends one half of the micro-batches in each direction, and {micro_batches} '
            f'are odd: use {micro_batches + 1}; a multiple of the {stages} stages is best.'
        )
    placed = []
    for start in range(0, micro_batches, stages):
        half = min(stages, micro_batches - start) // 2
        for direction in (DOWN, UP):
            for i in range(half):
                m, at = start + direction * half + i, 2 * start + 2 * i
                for s in range(stages):
                    placed += [
                        (at + s, Task(FORWARD, s, m, direction)),
                        (at + 2 * stages - 1 - s, Task(BACKWARD, s, m, direction)),
                    ]
    return _table('chimera', stages, micro_batches, placed)


METHODS = {'gpipe': gpipe, '1f1b': one_f_one_b, 'chimera': chimera}


def make_schedule(method: str, stages: int, micro_batches: int) -> PipelineSchedule:
    """The schedule of a method, by name; BadInput if there is none for these numbers."""
    if method not in METHODS:
        raise BadInput(
            f'There is no pipeline method {method!r}; choose one of {", ".join(METHODS)}.'
        )
    return METHODS[method](stages, micro_batches)


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Consecutive layers of each stage, one more in the first ones; or BadInput for too few."""
    if layers < stages:
        raise BadInput(
            f'{layers} layers cannot be cut into {stages} stages: use at most {layers} '
            'stages, or more layers.'
        )
    each, more = divmod(layers, stages)
    starts = [s * each + min(s, more) for s in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def _at_least_one(stages: int, micro_batches: int) -> None:
    for what, number in (('stages', stages), ('micro-batches', micro_batches)):
        if number < 1:
            raise BadInput(f'A pipeline of {number} {what} was asked for; it needs at least 1.')


def _one_way(
    name: str, stages: int, micro_batches: int, slots: Callable[[int, int], tuple[int, int]]
) -> PipelineSchedule:
    """``slots``: of both passes, by stage and micro-batch."""
    _at_least_one(stages, micro_batches)
    every = product((FORWARD, BACKWARD), range(stages), range(micro_batches))
    placed = ((slots(s, m)[kind == BACKWARD], Task(kind, s, m)) for kind, s, m in every)
    return _table(name, stages, micro_batches, placed)


def _table(
    name: str, stages: int, micro_batches: int, placed: Iterable[tuple[int, Task]]
) -> PipelineSchedule:
    bare = PipelineSchedule(name, stages, micro_batches, ())
    slots: list[dict[int, Task]] = [{} for _ in range(stages)]
    for slot, task in placed:
        row = slots[bare.worker(task.stage, task.direction)]
        assert slot not in row, f'{task} and {row[slot]} in one slot'
        row[slot] = task
    length = 1 + max(max(row) for row in slots)
    table = tuple(tuple(row.get(slot) for slot in range(length)) for row in slots)
    return PipelineSchedule(name, stages, micro_batches, table)


@dataclass(frozen=True)
class StageTransfer:
    """The result of a task (activations or their gradients), on its way to another worker."""

    task: Task
    source: int
    target: int


@dataclass(frozen=True)
class Step:
    """A worker's slot: its task, messages after it, and (direction, stage)s then complete."""

    task: Task | None
    receives: tuple[StageTransfer, ...]
    sends: tuple[StageTransfer, ...]
    completes: tuple[int, int] | None


def programs_of(schedule: PipelineSchedule) -> tuple[tuple[Step, ...], ...]:
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
    taker = schedule.fed_by(task, 1) if task is not None else None
    if task is None or taker is None:
        return None
    source, target = (schedule.worker(one.stage, one.direction) for one in (task, taker))
    return StageTransfer(task, source, target)
