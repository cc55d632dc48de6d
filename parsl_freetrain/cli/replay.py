"""``freetrain replay``: what FreeTrain would have trained on a real machine's record."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parsl_freetrain.core.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

    from parsl_freetrain.replay.request import Request
    from parsl_freetrain.replay.result import ReplayResult

SHOWN = ['efficiency', 'work_efficiency', 'compared', 'samples', 'used_node_s', 'preempted', 'rescaled', 'wall_s']
"""What a human sees of each row of a sweep."""


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
    sweep: Annotated[list[str] | None, typer.Option(
        metavar='NAME=V1,V2,...', help='Replay with each of these values of an option; several: all combinations.')] = None,
    out: Annotated[Path | None, typer.Option(metavar='FILE', help='Write what was found as a table, .csv or .parquet.')] = None,
    pictures: Annotated[Path | None, typer.Option(metavar='FOLDER', help='Draw what was found.')] = None,
    jobs: Annotated[int, typer.Option(metavar='N', help='Processes for a sweep; -1: one for each core.')] = -1,
    as_json: Annotated[bool, typer.Option('--json', help='Answer as a JSON document.')] = False,
) -> None:
    """Replay a machine's record: what would these trainers have trained in its holes?

    The same decisions as live, on a virtual clock. U compares with a constant pool of as many node-seconds.
    """
    options: dict[str, object] = {
        'trainers': trainers, 'idle': idle, 'swf': swf, 'sacct': sacct, 'pbs': pbs, 'synthetic': synthetic, 'machine_nodes': machine_nodes,
        'nodes': nodes, 'since': since, 'until': until, 'max_trainers': max_trainers, 'horizon': horizon, 'solver': solver.value,
        'time_limit': time_limit, 'objective': objective, 'rescale_cost': rescale_cost, 'rescale_up': rescale_up,
        'rescale_down': rescale_down, 'spans_blocks': spans_blocks, 'known_ends': known_ends, 'min_hole': min_hole,
        'min_rescale': min_rescale}
    # The help is there without numpy and the solvers.
    from parsl_freetrain.replay import sweep as sweeping
    swept = sweeping.axes(sweep or [])
    asked = sweeping.requests(options, swept)
    if out is not None:
        sweeping.check_out(out)
    if jobs < 1 and jobs != -1:
        raise BadInput(f'--jobs is {jobs}; it must be a number of processes, or -1.')
    if pictures is not None:
        _make(pictures)
    if swept:
        _many(asked, list(swept), out, pictures, jobs, as_json)
    else:
        _one(asked[0], out, pictures, as_json)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f'--pictures is {folder}, which cannot be made ({error.strerror}); give a folder.') from None


def _one(request: Request, out: Path | None, pictures: Path | None, as_json: bool) -> None:
    from parsl_freetrain.replay.scenario import replay
    result = replay(request.scenario())
    print(json.dumps(result.as_json(), allow_nan=False) if as_json else '\n'.join(described(result)))
    if out is not None:
        import pandas as pd

        from parsl_freetrain.replay import sweep
        sweep.write(pd.DataFrame([sweep.row(result)]), out)
    if pictures is not None:
        from parsl_freetrain.replay.pictures import draw
        draw(result, pictures)


def _many(asked: list[Request], swept: list[str], out: Path | None, pictures: Path | None, jobs: int, as_json: bool) -> None:
    from parsl_freetrain.replay import sweep as sweeping
    columns = [sweeping.column(field) for field in swept]
    table = _with_a_bar(asked, swept, min(jobs, len(asked)))
    if as_json:
        print(json.dumps(table.astype(object).where(table.notna(), None).to_dict('records'), allow_nan=False))
    else:
        print(table[columns + SHOWN].to_string(index=False, float_format=lambda value: f'{value:.4g}'))
    if out is not None:
        sweeping.write(table, out)
    if pictures is not None:
        from parsl_freetrain.replay.sweep_pictures import draw
        draw(table, columns, pictures)


def _with_a_bar(asked: list[Request], swept: list[str], jobs: int) -> pd.DataFrame:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from parsl_freetrain.replay.sweep import sweep
    # Where nobody looks, a bar is noise.
    bar = Progress(TextColumn('replays'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    with bar if sys.stderr.isatty() else nullcontext():
        task = bar.add_task('replays', total=len(asked))
        return sweep(asked, swept, jobs=jobs, done=lambda: bar.advance(task))


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
    from parsl_freetrain.replay.result import WHERE_THEY_WENT
    for key, why in WHERE_THEY_WENT.items():
        if run.node_s[key]:
            lines.append(f'  {why:30}{run.node_s[key] / 3600:10.1f}{100 * run.node_s[key] / run.idle_node_s:7.1f} %')
    lines.append(f'decisions            {said["events"]}, ms: median {thought["p50"]:.2f}, p99 {thought["p99"]:.2f}, '
                 f'max {thought["max"]:.2f}; {result.wall_s:.1f} s in all')
    return lines
