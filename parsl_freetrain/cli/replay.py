"""``freetrain replay``: computes what FreeTrain would have trained on a real machine's record."""

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import progress
from rich.console import Console

from parsl_freetrain.cli.where import RunOption, flag, journal_at, value
from parsl_freetrain.core.model.checked_settings import described
from parsl_freetrain.core.model.errors import BadInput, clean, of_file
from parsl_freetrain.replay.habits import write_habits
from parsl_freetrain.replay.recorded_run import RunReplay, changed, replay_run
from parsl_freetrain.replay.result import WHERE_THEY_WENT, ReplayResult
from parsl_freetrain.replay.study import Study, option, read_study
from parsl_freetrain.report.runs import chosen

if TYPE_CHECKING:
    import pandas as pd


SHOWN = [
    'efficiency', 'work_efficiency', 'compared', 'samples', 'used_node_s', 'preempted',
    'rescaled', 'wall_s',
]  # fmt: skip
"""The columns of a sweep's table on the terminal."""

SETTINGS = {
    'idle': 'FILE',
    'trainers': 'FILE',
    'nodes': 'N',
    'since': 'S',
    'until': 'S',
    'max_trainers': 'N|all',
    'horizon': 'S',
    'solver': 'NAME',
    'curves': 'stated|learned',
    'noise': 'SIGMA',
    'measure_s': 'S',
    'seed': 'N',
}
"""The settings of a :class:`~parsl_freetrain.replay.study.Study` that are options too."""

OF_A_LEDGER = ('solver', 'horizon', 'objective', 'time_limit')


def _with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, with an option for each of :data:`SETTINGS` in place of its keyword arguments."""
    texts = described(Study)
    *own, _ = inspect.signature(verb, eval_str=True).parameters.values()
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Option(option(name), metavar=takes, help=texts[name])
            ],
        )
        for name, takes in SETTINGS.items()
    ]
    together: Any = verb
    together.__signature__ = inspect.Signature([*own, *more])
    together.__annotations__ = {each.name: each.annotation for each in (*own, *more)}
    return verb


@_with_settings
def replay(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar='STUDY.toml',
            help='Settings, those below and others; lists in its table sweep are replayed in all '
            'combinations. Options replace what it says.',
        ),
    ] = None,
    ledger: Annotated[
        Path | None,
        value('PATH', "A live run's ledger, or its folder, in place of a trace and trainers."),
    ] = None,
    run: RunOption = None,
    learn_habits: Annotated[
        Path | None,
        value('FILE', 'Learn how long nodes stay from the record, write it to this file, and end.'),
    ] = None,
    out: Annotated[
        Path | None, value('FILE', 'Write the results as a table (.csv or .parquet).')
    ] = None,
    pictures: Annotated[
        Path | None, value('FOLDER', 'Write charts of the results to this folder.')
    ] = None,
    jobs: Annotated[int, value('N', 'Processes for a sweep; -1: one for each core.')] = -1,
    as_json: Annotated[bool, flag('Answer as a JSON document.', '--json')] = False,
    **settings: str | None,
) -> None:
    """Replay a machine's record: what would these trainers have trained in its holes?

    The same decisions as live, on a virtual clock. The efficiency U is what
    was trained, divided by what the same trainers would have trained on a constant number of nodes
    with as many node-seconds.
    """
    given, swept = ({}, {}) if file is None else read_study(file)
    given |= {name: value for name, value in settings.items() if value is not None}
    if ledger is not None:
        _recorded({**given, **swept}, ledger, run, as_json)
        return
    if run is not None:
        raise BadInput('--run is for a run of a ledger: give --ledger, too, or leave --run out.')
    if learn_habits is not None:
        write_habits(Study.of_trace(given, '--learn-habits').trace(), learn_habits)
        return
    if not {'trainers'} & {*given, *swept}:
        raise BadInput('Give --trainers with a trace, or --ledger with the ledger of a live run.')
    from parsl_freetrain.replay import sweep as sweeping

    asked = sweeping.requests(given, swept)
    if out is not None:
        sweeping.check_out(out)
    if jobs < 1 and jobs != -1:
        raise BadInput(f'--jobs is {jobs}; it must be a number of processes, or -1.')
    if pictures is not None:
        with of_file(f'--pictures is {pictures}, which cannot be made', 'give a folder'):
            pictures.mkdir(mode=0o700, parents=True, exist_ok=True)
    if swept:
        _many(asked, list(swept), out, pictures, jobs, as_json)
    else:
        _one(asked[0], out, pictures, as_json)


def _recorded(given: dict[str, Any], ledger: Path, run: str | None, as_json: bool) -> None:
    for name in given:
        if name not in OF_A_LEDGER:
            raise BadInput(
                f'{option(name)} does not go with --ledger: a recorded run has its own trainers '
                f'and nodes. What goes with it: --run, {", ".join(map(option, OF_A_LEDGER))}.'
            )
    wanted, journal = Study.of(given), journal_at(ledger, keep_progress=False)
    one = chosen(journal.history(), journal.path, run)
    asked = (getattr(wanted, name) if name in given else None for name in OF_A_LEDGER)
    found = replay_run(journal, one, changed(one, *asked))
    print(json.dumps(found.as_json(), allow_nan=False) if as_json else '\n'.join(of_a_run(found)))


def _one(request: Study, out: Path | None, pictures: Path | None, as_json: bool) -> None:
    from parsl_freetrain.replay.scenario import replay

    result = replay(request.scenario())
    print(json.dumps(result.as_json(), allow_nan=False) if as_json else '\n'.join(lines_of(result)))
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
        rows = table.astype(object).where(table.notna(), None).to_dict('records')
        print(json.dumps(rows, allow_nan=False))
    else:
        print(table[columns + SHOWN].to_string(index=False, float_format='{:.4g}'.format))
    if out is not None:
        sweeping.write(table, out)
    if pictures is not None:
        from parsl_freetrain.replay.pictures import draw_sweep

        draw_sweep(table, columns, pictures)


def _with_a_bar(asked: list[Study], swept: list[str], jobs: int) -> 'pd.DataFrame':
    from parsl_freetrain.replay.sweep import sweep

    columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
    bar = progress.Progress(progress.TextColumn('replays'), *columns, console=Console(stderr=True))
    with bar if sys.stderr.isatty() else nullcontext():
        task = bar.add_task('replays', total=len(asked))
        return sweep(asked, swept, jobs=jobs, done=lambda: bar.advance(task))


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
    of_what = {'samples': 'samples in the same time', 'time': 'times for the same samples'}
    u, most = result.efficiency, result.efficiency_bound
    known = '-' if u is None else f'{u:.4f}'
    lines = [f'efficiency U         {known}   ({of_what[result.compared]})']
    if most is not None:
        aside = 'whatever is decided; ends of trainers aside'
        lines.append(f'  at most            {most:.4f}   ({aside})')
    lines += [
        f'samples              {run.samples:.4g}, on a constant pool {result.constant.samples:.4g}',
        f'idle                 {run.idle_node_s / 3600:.1f} node-hours in {hours:.1f} h, '
        f'in the mean {result.equivalent_nodes:.1f} nodes',
        f'trainers             {len(run.done_s)} of {len(run.samples_by_trainer)} done, '
        f'{run.preempted} preemptions, {run.rescaled} rescales',
        'where the idle node-hours went:',
    ]
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
