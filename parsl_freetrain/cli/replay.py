"""``freetrain replay``: what FreeTrain would have trained on a real machine's record."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parsl_freetrain.core.errors import BadInput

if TYPE_CHECKING:
    from parsl_freetrain.replay.result import ReplayResult
    from parsl_freetrain.replay.trace import Trace

REASONS = {
    'trained': 'trained', 'rescaling': 'lost to rescales', 'lost_to_preemption': 'lost to preemptions', 'too_short': 'about to go',
    'kept_free': 'kept free', 'no_use': 'no trainer could use them', 'not_worth': 'not worth a rescale',
    'stranded': 'idle beside a waiting trainer',
}


class Solver(StrEnum):
    AUTO = 'auto'
    MILP = 'milp'
    DP = 'dp'
    EQUAL_SHARE = 'equal-share'


def replay(
    trainers: Annotated[Path, typer.Option(metavar='FILE', help='Who trains: a JSON list, plain or gzipped.')],
    idle: Annotated[Path | None, typer.Option(metavar='FILE', help='Idle intervals: CSV start_s,end_s,node.')] = None,
    swf: Annotated[Path | None, typer.Option(metavar='FILE', help='A job log in Standard Workload Format.')] = None,
    sacct: Annotated[Path | None, typer.Option(metavar='FILE', help='What sacct --parsable2 printed.')] = None,
    pbs: Annotated[Path | None, typer.Option(metavar='FILE', help='An accounting log of PBS.')] = None,
    synthetic: Annotated[int | None, typer.Option(metavar='SEED', help='A made-up week with the statistics of Summit.')] = None,
    machine_nodes: Annotated[int | None, typer.Option(metavar='N', help='Nodes of the machine, where a job log does not say.')] = None,
    nodes: Annotated[int | None, typer.Option(metavar='N', help='Only the first N node names in sorted order.')] = None,
    since: Annotated[float | None, typer.Option('--from', metavar='S', help="Seconds from the trace's start.")] = None,
    until: Annotated[float | None, typer.Option(metavar='S', help="Seconds from the trace's start.")] = None,
    max_trainers: Annotated[str, typer.Option(metavar='N|all', help='So many unfinished trainers get nodes at a time.')] = 'all',
    horizon: Annotated[float, typer.Option(metavar='S', help='How far a decision looks ahead.')] = 120.0,
    solver: Annotated[Solver, typer.Option(help='auto takes the fastest exact one; equal-share is the published heuristic.')] = Solver.AUTO,
    time_limit: Annotated[float, typer.Option(metavar='S', help='Seconds for one solve; then the best found is taken.')] = 10.0,
    objective: Annotated[str | None, typer.Option(metavar='NAME|EXPR', help="In place of what the trainers' file says.")] = None,
    rescale_cost: Annotated[float, typer.Option(metavar='X', help='Factor on all rescale costs.')] = 1.0,
    rescale_up: Annotated[float | None, typer.Option(metavar='S', help="Cost of more nodes, in place of the trainers' own.")] = None,
    rescale_down: Annotated[float | None, typer.Option(metavar='S', help='Cost of fewer nodes, and of a preemption.')] = None,
    spans_blocks: Annotated[bool, typer.Option(help='Whether a trainer may use nodes that became idle at different times.')] = True,
    known_ends: Annotated[bool, typer.Option('--known-ends', help='Decide with what reservations promise; needs a job log.')] = False,
    min_hole: Annotated[float, typer.Option(metavar='S', help='Nodes that are known to go sooner are left alone.')] = 5.0,
    min_rescale: Annotated[float, typer.Option(metavar='S', help='Least time between two rescales of a trainer.')] = 0.0,
    as_json: Annotated[bool, typer.Option('--json', help='Answer as a JSON document.')] = False,
) -> None:
    """Replay a machine's record: what would these trainers have trained in its holes?

    The same decisions as live, on a virtual clock. U compares with a constant pool of as many node-seconds.
    """
    # The help is there without numpy and the solvers.
    from parsl_freetrain.core.state import ControllerSettings
    from parsl_freetrain.replay.scenario import Scenario, replay
    from parsl_freetrain.replay.trainers import read_trainers
    if not 0 < time_limit < math.inf:
        raise BadInput(f'--time-limit is {time_limit:g}; it must be a number of seconds above 0.')
    settings = ControllerSettings(
        horizon_s=horizon, min_hole_s=min_hole, metric=objective or 'throughput', spans_blocks=spans_blocks, min_rescale_s=min_rescale,
        trainers_at_a_time=_at_a_time(max_trainers))
    files = {'idle': idle, 'swf': swf, 'sacct': sacct, 'pbs': pbs}
    trace = _trace({kind: path for kind, path in files.items() if path is not None}, synthetic, nodes, since, until, machine_nodes)
    result = replay(Scenario(
        trace, read_trainers(trainers), settings, solver.value, time_limit, known_ends, rescale_cost, rescale_up, rescale_down,
        by_file=objective is None))
    print(json.dumps(result.as_json(), allow_nan=False) if as_json else '\n'.join(described(result)))


def _at_a_time(text: str) -> int | None:
    if text == 'all':
        return None
    if not (text.isdecimal() and text.isascii() and 0 < len(text) < 10 and int(text) > 0):
        raise BadInput(f'--max-trainers is {text!r}; it must be a whole number above 0, or all.')
    return int(text)


def _trace(files: dict[str, Path], synthetic: int | None, nodes: int | None, since: float | None, until: float | None,
           machine_nodes: int | None) -> Trace:
    from parsl_freetrain.replay import idle
    from parsl_freetrain.replay.reading import kind_of, read_trace
    if len(files) + (synthetic is not None) != 1:
        raise BadInput('Give one trace, with one of --idle, --swf, --sacct, --pbs and --synthetic.')
    for what, seconds in (('--from', since), ('--until', until)):
        if seconds is not None and not math.isfinite(seconds):
            raise BadInput(f'{what} is {seconds:g}; it must be a number of seconds.')
    if synthetic is not None:
        return idle.synthetic(synthetic).window(nodes, since, until)
    (kind, path), = files.items()
    found = kind_of(path)
    if found != kind:
        hint = '' if found == 'idle' else f'; it looks like what --{found} takes'  # what is nothing else is taken for idle intervals
        raise BadInput(f'{path} does not look like what --{kind} takes{hint}.')
    return read_trace(path, nodes, since, until, machine_nodes=machine_nodes)


def described(result: ReplayResult) -> list[str]:
    """The lines that a human reads."""
    run = result.trace
    hours = (run.end_s - run.start_s) / 3600
    said = result.as_json()
    thought = said['decision_ms']
    assert isinstance(thought, dict)
    compared = {'samples': 'samples in the same time', 'time': 'times for the same samples'}[result.compared]
    lines = [
        f'efficiency U         {"-" if result.efficiency is None else format(result.efficiency, ".4f")}   ({compared})',
        f'samples              {run.samples:.4g}, on a constant pool {result.constant.samples:.4g}',
        f'idle                 {run.idle_node_s / 3600:.1f} node-hours in {hours:.1f} h, in the mean {result.equivalent_nodes:.1f} nodes',
        f'trainers             {run.trainers_done} of {len(run.samples_by_trainer)} done, {run.preempted} preemptions, '
        f'{run.rescaled} rescales',
        'where the idle node-hours went:',
    ]
    for key, why in REASONS.items():
        if run.node_s[key]:
            lines.append(f'  {why:30}{run.node_s[key] / 3600:10.1f}{100 * run.node_s[key] / run.idle_node_s:7.1f} %')
    lines.append(f'decisions            {said["events"]}, ms: median {thought["p50"]:.2f}, p99 {thought["p99"]:.2f}, '
                 f'max {thought["max"]:.2f}; {result.wall_s:.1f} s in all')
    return lines
