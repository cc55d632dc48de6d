"""What ``freetrain replay`` says on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsl_freetrain.core.model.errors import clean

if TYPE_CHECKING:
    from parsl_freetrain.replay.recorded_run import RunReplay
    from parsl_freetrain.replay.result import ReplayResult

MOST_DIFFERENCES = 20


def of_a_run(found: RunReplay) -> list[str]:

    settings = found.settings

    def gain(value: float | None) -> str:
        return '-' if value is None else format(value, '.4g')

    lines = [
        f'run                  {clean(found.run)}',
        f'replayed with        solver {settings.solver}, horizon '
        f'{settings.controller.horizon_s:g} s, objective {clean(settings.controller.metric)}',
        f'decisions            {found.decisions}, the same {found.same}',
        f'expected gain per s  {gain(found.run_gain_per_s)} in the run, '
        f'{gain(found.replay_gain_per_s)} in the replay (mean, in the unit of the objective)',
    ]
    if found.reproduced < found.decisions:
        lines.append(
            f"The run's own settings reproduce only {found.reproduced} of {found.decisions} "
            'decisions: its solver may have run out of time.'
        )
    for difference in found.differences[:MOST_DIFFERENCES]:
        before, after = difference.run.allocation, difference.replay
        then = {} if after is None else after.allocation
        both = ((name, before.get(name, 0), then.get(name, 0)) for name in {**before, **then})
        changes = [f'{clean(name)} {old} -> {new}' for name, old, new in both if old != new]
        what = 'no decision' if after is None else ', '.join(changes) or 'other nodes'
        lines.append(f'  {difference.at_s:10.1f} s  {difference.trigger:24} {what}')
    if len(found.differences) > MOST_DIFFERENCES:
        lines.append(f'  and {len(found.differences) - MOST_DIFFERENCES} more; --json has all')
    return lines


def lines_of(result: ReplayResult) -> list[str]:
    run = result.trace
    hours = (run.end_s - run.start_s) / 3600
    said = result.as_json()
    thought = said['decision_ms']
    assert isinstance(thought, dict)
    compared = {'samples': 'samples in the same time', 'time': 'times for the same samples'}[
        result.compared
    ]
    lines = [
        'efficiency U         '
        f'{"-" if result.efficiency is None else format(result.efficiency, ".4f")}   ({compared})',
        *(
            []
            if result.efficiency_bound is None
            else [
                f'  at most            {result.efficiency_bound:.4f}   '
                '(whatever is decided; ends of trainers aside)'
            ]
        ),
        f'samples              {run.samples:.4g}, on a constant pool {result.constant.samples:.4g}',
        f'idle                 {run.idle_node_s / 3600:.1f} node-hours in {hours:.1f} h, '
        f'in the mean {result.equivalent_nodes:.1f} nodes',
        f'trainers             {run.trainers_done} of {len(run.samples_by_trainer)} done, '
        f'{run.preempted} preemptions, {run.rescaled} rescales',
        'where the idle node-hours went:',
    ]
    from parsl_freetrain.replay.result import WHERE_THEY_WENT

    for key, why in WHERE_THEY_WENT.items():
        if run.node_s[key]:
            hours = run.node_s[key] / 3600
            share = 100 * run.node_s[key] / run.idle_node_s
            lines.append(f'  {why:30}{hours:10.1f}{share:7.1f} %')
    if result.oracle is not None:
        lines.append(
            f'learned curves       {said["work_ratio"]:.4f} of the normalised work with known '
            'curves'
        )
    lines.append(
        f'decisions            {said["events"]}, ms: median {thought["p50"]:.2f}, p99 '
        f'{thought["p99"]:.2f}, max {thought["max"]:.2f}; {result.wall_s:.1f} s in all'
    )
    return lines
