"""Pipeline schedules as tables: right for all sizes, and as long as formulas say."""

from dataclasses import replace

import pytest

from parsl_freetrain import BadInput
from parsl_freetrain.training.parallel.pipeline.schedule import (
    METHODS,
    PipelineSchedule,
    Task,
    chimera,
    gpipe,
    make_schedule,
    message_of,
    one_f_one_b,
    split_layers,
)
from workflows import pipeline_facts as facts

DEPTHS = (2, 4, 6, 8, 12, 16)


def test_chimera_from_d_to_4d_micro_batches() -> None:
    for stages in DEPTHS:
        for micro_batches in range(stages, 4 * stages + 1, 2 if stages <= 8 else stages - 2):
            schedule = chimera(stages, micro_batches)
            assert facts.faults(schedule) == ()
            fill = -micro_batches % stages
            assert (
                schedule.slots == facts.makespan(schedule) == 2 * micro_batches + stages - 2 + fill
            )
            assert schedule.slots < one_f_one_b(stages, micro_batches).slots


@pytest.mark.parametrize('method', ['gpipe', '1f1b'])
def test_gpipe_and_1f1b(method: str) -> None:
    depths = [(depth, n) for depth in DEPTHS for n in (1, depth, depth + 1, 3 * depth)]
    for stages, micro_batches in depths:
        schedule = make_schedule(method, stages, micro_batches)
        assert facts.faults(schedule) == ()
        assert schedule.slots == facts.makespan(schedule) == 2 * micro_batches + 2 * (stages - 1)
        assert facts.bubbles(schedule) == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_one_stage_has_no_bubbles() -> None:
    assert one_f_one_b(1, 5).slots == 10 and facts.bubbles(gpipe(1, 5)) == 0


def test_memory() -> None:
    """GPipe keeps all micro-batches, 1F1B from 1 to D of them, Chimera from D/2 + 1 to D."""
    for stages, many in [(depth, units * depth) for depth in DEPTHS for units in (1, 2)]:
        assert facts.activations(gpipe(stages, many)) == (many,) * stages
        assert facts.activations(one_f_one_b(stages, many)) == tuple(range(stages, 0, -1))
        peaks = facts.activations(chimera(stages, many))
        assert (min(peaks), max(peaks)) == (stages // 2 + 1, stages)
        assert max(peaks) - min(peaks) == stages // 2 - 1 < stages - 1


def test_both_directions_are_used_and_workers_hold_two_stages() -> None:
    schedule = chimera(4, 4)
    held = [schedule.held(worker) for worker in range(4)]
    assert held == [((0, w), (1, 3 - w)) for w in range(4)]
    told = ['.' if task is None else f'{task.kind}{task.micro_batch}' for task in schedule.rows[0]]
    assert ''.join(told) == 'F0.F1F2B2F3B3B0.B1'


def test_unequal_passes_are_timed_in_the_schedules_order() -> None:
    """Backward passes of twice the length; Chimera still gains at few micro-batches."""
    assert facts.makespan(one_f_one_b(4, 8), 1, 2) == 3 * (8 + 3)
    assert facts.makespan(gpipe(4, 8), 0.5, 1) == 1.5 * (8 + 3)
    assert facts.makespan(chimera(4, 4), 1, 2) == 16 < facts.makespan(one_f_one_b(4, 4), 1, 2) == 21


def test_what_cannot_be_is_refused() -> None:
    for method, stages, micro_batches, words in (
        ('chimera', 3, 4, 'even number of stages.*3 are asked for: use 2 or 4'),
        ('chimera', 1, 4, 'use 2, or 1F1B'),
        ('chimera', 4, 5, 'each direction, and 5 are odd: use 6; a multiple of the 4 stages'),
        ('chimera', 4, 0, '0 micro-batches'),
        ('gpipe', 0, 4, '0 stages'),
        ('dualpipe', 4, 4, "no pipeline method 'dualpipe'; choose one of gpipe, 1f1b, chimera"),
    ):
        with pytest.raises(BadInput, match=words):
            make_schedule(method, stages, micro_batches)


def test_layers_are_cut_evenly() -> None:
    assert split_layers(7, 3) == (range(3), range(3, 5), range(5, 7))
    with pytest.raises(BadInput, match='3 layers cannot be cut into 4 stages: use at most 3'):
        split_layers(3, 4)


def changed(
    schedule: PipelineSchedule, worker: int, change: dict[int, Task | None]
) -> PipelineSchedule:
    rows = [list(row) for row in schedule.rows]
    for slot, task in change.items():
        rows[worker][slot] = task
    return replace(schedule, rows=tuple(map(tuple, rows)))


def test_the_checker_finds_what_is_wrong() -> None:
    right = chimera(4, 4)
    first, forward, backward = (right.rows[0][slot] for slot in (0, 3, 4))
    assert first is not None
    wrong: list[tuple[dict[int, Task | None], str]] = [
        ({0: None}, 'is missing'),
        ({1: first}, 'there 2 times'),
        ({3: backward, 4: forward}, 'is not after'),
        ({1: replace(first, micro_batch=2)}, 'Micro-batch 2 goes in 2 directions'),
        ({0: replace(first, stage=1)}, 'which does not have the stage'),
    ]
    for change, words in wrong:
        assert any(words in fault for fault in facts.faults(changed(right, 0, change))), words
    # Nothing depends on the last one, but the holders of its stage would not exchange gradients in
    # the same order.
    first_row, *others = right.rows
    rows = ((*first_row[:-1], None, first_row[-1]), *((*row, None) for row in others))
    late = replace(right, rows=rows)
    assert ['is complete in slot' in fault for fault in facts.faults(late)] == [True]


@pytest.mark.parametrize('method', METHODS)
def test_receiving_before_sending_is_what_keeps_them_going(method: str) -> None:
    """The obvious order has neighbours send to each other, and stay there."""
    schedule = make_schedule(method, 4, 8)
    assert not facts.stuck(facts.actions_of(schedule))
    naive = []
    for row in schedule.rows:
        program: list[facts.WorkerAction] = []
        for task in row:
            if task is not None:
                takes = message_of(schedule, schedule.fed_by(task))
                gives = message_of(schedule, task)
                program += [
                    facts.WorkerAction(verb, takes)
                    for verb in (facts.POST, facts.WAIT)
                    if takes is not None
                ]
                sends = [facts.WorkerAction(facts.SEND, gives)] if gives is not None else []
                program += [facts.WorkerAction(facts.RUN, task), *sends]
        naive.append(program)
    # With GPipe everything flows one way, then the other.
    assert bool(facts.stuck(naive)) == (method != 'gpipe')
