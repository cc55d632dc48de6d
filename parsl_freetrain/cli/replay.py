"""``freetrain replay``: computes what FreeTrain would have trained on a real machine's record."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parsl_freetrain.cli.replay_text import described, of_a_run
from parsl_freetrain.cli.where import RunOption, ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.names import run_named

if TYPE_CHECKING:
    import pandas as pd

    from parsl_freetrain.replay.study import Study

SHOWN = [
    'efficiency',
    'work_efficiency',
    'compared',
    'samples',
    'used_node_s',
    'preempted',
    'rescaled',
    'wall_s',
]
"""The columns of a sweep's table on the terminal."""

NOT_OF_A_REQUEST = ('sweep', 'out', 'pictures', 'jobs', 'as_json')
OF_A_LEDGER = ('ledger', 'run', 'solver', 'horizon', 'objective', 'time_limit', 'as_json')


def replay(
    ctx: typer.Context,
    trainers: Annotated[
        Path | None,
        typer.Option(metavar='FILE', help='The trainers: a JSON list, plain or gzipped.'),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            metavar='PATH',
            help="A live run's ledger, or its folder, in place of a trace and trainers.",
        ),
    ] = None,
    run: RunOption = None,
    idle: Annotated[
        Path | None, typer.Option(metavar='FILE', help='Idle intervals: CSV start_s,end_s,node.')
    ] = None,
    swf: Annotated[
        Path | None, typer.Option(metavar='FILE', help='A job log in Standard Workload Format.')
    ] = None,
    sacct: Annotated[
        Path | None, typer.Option(metavar='FILE', help='What sacct --parsable2 printed.')
    ] = None,
    pbs: Annotated[
        Path | None, typer.Option(metavar='FILE', help='An accounting log of PBS.')
    ] = None,
    synthetic: Annotated[
        int | None,
        typer.Option(metavar='SEED', help='A made-up week with the statistics of Summit.'),
    ] = None,
    machine_nodes: Annotated[
        int | None,
        typer.Option(metavar='N', help='Nodes of the machine, where a job log does not say.'),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar='N', help='Only the first N node names in sorted order.')
    ] = None,
    since: Annotated[
        float | None, typer.Option('--from', metavar='S', help="Seconds from the trace's start.")
    ] = None,
    until: Annotated[
        float | None, typer.Option(metavar='S', help="Seconds from the trace's start.")
    ] = None,
    max_trainers: Annotated[
        str, typer.Option(metavar='N|all', help='Maximum number of trainers that share the nodes.')
    ] = 'all',
    horizon: Annotated[
        float | None,
        typer.Option(
            metavar='S',
            help='Seconds that a decision looks ahead. Default: 120; with --ledger, as in the run.',
        ),
    ] = None,
    solver: Annotated[
        str | None,
        typer.Option(
            metavar='NAME',
            help='auto (the fastest exact one), milp, dp or equal-share (the published heuristic); '
            "auto, or with --ledger the run's.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar='S',
            help='Maximum seconds for one solve; then the best allocation found is used. Default: '
            '10; with --ledger, as in the run.',
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(metavar='NAME|EXPR', help="In place of what the trainers' file says."),
    ] = None,
    rescale_cost: Annotated[
        float, typer.Option(metavar='X', help='Factor on all rescale costs.')
    ] = 1.0,
    rescale_up: Annotated[
        float | None,
        typer.Option(
            metavar='S',
            help='Seconds without training after a change to more nodes, in place of what the '
            'trainers say.',
        ),
    ] = None,
    rescale_down: Annotated[
        float | None,
        typer.Option(
            metavar='S', help='As --rescale-up, for a change to fewer nodes or a preemption.'
        ),
    ] = None,
    spans_blocks: Annotated[
        bool,
        typer.Option(help='Whether a trainer may use nodes that became idle at different times.'),
    ] = True,
    known_ends: Annotated[
        bool,
        typer.Option(
            '--known-ends',
            help='Let decisions know when reservations will take nodes; needs a job log.',
        ),
    ] = False,
    min_hole: Annotated[
        float,
        typer.Option(
            metavar='S', help='Do not use nodes that are known to leave sooner than this.'
        ),
    ] = 5.0,
    min_rescale: Annotated[
        float, typer.Option(metavar='S', help='Minimum seconds between two rescales of a trainer.')
    ] = 0.0,
    habits: Annotated[
        Path | None,
        typer.Option(metavar='FILE', help='How long nodes stay, as --learn-habits has written it.'),
    ] = None,
    learn_habits: Annotated[
        Path | None,
        typer.Option(
            metavar='FILE',
            help='Learn how long nodes stay from the record, write it to this file, and end.',
        ),
    ] = None,
    curves: Annotated[
        str,
        typer.Option(
            metavar='stated|learned',
            help="Whether decisions know the trainers' scaling curves, or learn them from what "
            'fragments measure.',
        ),
    ] = 'stated',
    noise: Annotated[
        float | None,
        typer.Option(metavar='SIGMA', help='Relative noise of measured speeds. Default: 0.'),
    ] = None,
    measure_s: Annotated[
        float | None,
        typer.Option(
            metavar='S',
            help="Seconds until the first measurement of a fragment's speed; doubled for each "
            'later one. Default: 10.',
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar='N', help='Seed of the noise. Default: 0.')
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar='NAME=V1,V2,...',
            help='Replay with each of these values of an option; several: all combinations.',
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar='FILE', help='Write the results as a table (.csv or .parquet).'),
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(metavar='FOLDER', help='Write charts of the results to this folder.'),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar='N', help='Processes for a sweep; -1: one for each core.')
    ] = -1,
    as_json: Annotated[bool, typer.Option('--json', help='Answer as a JSON document.')] = False,
) -> None:
    """Replay a machine's record: what would these trainers have trained in its holes?

    The same decisions as live, on a virtual clock. The efficiency U is what
    was trained, divided by what the same trainers would have trained on a constant number of nodes
    with as many node-seconds.
    """
    given = {
        name: value
        for name, value in ctx.params.items()
        if getattr(ctx.get_parameter_source(name), 'name', '') != 'DEFAULT'
    }
    if ledger is not None:
        _recorded(given, ledger, run, as_json)
        return
    if run is not None:
        raise BadInput('--run is for a run of a ledger: give --ledger, too, or leave --run out.')
    if learn_habits is not None:
        from parsl_freetrain.replay.habits import write_habits
        from parsl_freetrain.replay.study import Study

        del given['learn_habits']
        write_habits(Study.of_trace(given, '--learn-habits').trace(), learn_habits)
        return
    if trainers is None:
        raise BadInput('Give --trainers with a trace, or --ledger with the ledger of a live run.')
    # Imported here, so that --help needs neither numpy nor solvers.
    from parsl_freetrain.replay import sweep as sweeping

    swept = sweeping.axes(sweep or [])
    asked = sweeping.requests({k: v for k, v in given.items() if k not in NOT_OF_A_REQUEST}, swept)
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


def _recorded(given: dict[str, Any], ledger: Path, run: str | None, as_json: bool) -> None:
    from parsl_freetrain.journal.read import Journal
    from parsl_freetrain.replay.recorded_run import changed, replay_run
    from parsl_freetrain.replay.study import option

    for name in given:
        if name not in OF_A_LEDGER:
            raise BadInput(
                f'{option(name)} does not go with --ledger: a recorded run has its own trainers '
                'and nodes. What goes with it: --run, --solver, --horizon, --objective, '
                '--time-limit and --json.'
            )
    journal = Journal(_journal(ledger_at(ledger)), keep_progress=False)
    runs = journal.history().runs
    newest = run_named([r.name for r in runs], run)
    if not runs:
        raise BadInput(f'The ledger {journal.path} has no run yet.')
    chosen = next((r for r in runs if r.name == newest), runs[-1])
    settings = changed(
        chosen,
        given.get('solver'),
        given.get('horizon'),
        given.get('objective'),
        given.get('time_limit'),
    )
    found = replay_run(journal, chosen, settings)
    print(json.dumps(found.as_json(), allow_nan=False) if as_json else '\n'.join(of_a_run(found)))


def _journal(path: Path) -> Path:
    return path.with_suffix('.journal') if path.suffix == '.sqlite' else path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f'--pictures is {folder}, which cannot be made ({error.strerror}); give a folder.'
        ) from None


def _one(request: Study, out: Path | None, pictures: Path | None, as_json: bool) -> None:
    from parsl_freetrain.replay.scenario import replay

    result = replay(request.scenario())
    print(
        json.dumps(result.as_json(), allow_nan=False) if as_json else '\n'.join(described(result))
    )
    if out is not None:
        import pandas as pd

        from parsl_freetrain.replay import sweep

        sweep.write(pd.DataFrame([sweep.row(result)]), out)
    if pictures is not None:
        from parsl_freetrain.replay.pictures import draw

        draw(result, pictures)


def _many(
    asked: list[Study],
    swept: list[str],
    out: Path | None,
    pictures: Path | None,
    jobs: int,
    as_json: bool,
) -> None:
    from parsl_freetrain.replay import sweep as sweeping

    columns = [sweeping.column(field) for field in swept]
    table = _with_a_bar(asked, swept, min(jobs, len(asked)))
    if as_json:
        print(
            json.dumps(
                table.astype(object).where(table.notna(), None).to_dict('records'), allow_nan=False
            )
        )
    else:
        print(
            table[columns + SHOWN].to_string(index=False, float_format=lambda value: f'{value:.4g}')
        )
    if out is not None:
        sweeping.write(table, out)
    if pictures is not None:
        from parsl_freetrain.replay.sweep_pictures import draw

        draw(table, columns, pictures)


def _with_a_bar(asked: list[Study], swept: list[str], jobs: int) -> pd.DataFrame:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from parsl_freetrain.replay.sweep import sweep

    # A progress bar is shown only on a terminal.
    bar = Progress(
        TextColumn('replays'),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar if sys.stderr.isatty() else nullcontext():
        task = bar.add_task('replays', total=len(asked))
        return sweep(asked, swept, jobs=jobs, done=lambda: bar.advance(task))
