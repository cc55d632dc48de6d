"""``freetrain run``: runs a workflow on a site."""

import contextlib
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from parsl_freetrain.cli.live.view import ClosingTable
from parsl_freetrain.cli.where import JsonOption, print_json, value
from parsl_freetrain.cli.workflow import workflow_at
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.summary import summary


def run(
    workflow: Annotated[
        str,
        typer.Argument(
            help='A Python file that calls trainings, or a file or module with a main(config).'
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The workflow's own arguments, after --.")
    ] = None,
    site: Annotated[
        str, value('NAME|FILE', 'local, a name in site_configs/, or a .py or .toml file.')
    ] = 'local',
    as_json: JsonOption = False,
) -> int:
    """Run a workflow on a site, with a Parsl configuration for it.

    A Python file is run as python runs it, with the configuration loaded, so it needs no more than
    decorated functions and their calls. If it has a function main(config), this is called instead,
    and loads the configuration itself by parsl.load(config). With --json the workflow's own output
    goes to standard error, and the closing summary to standard output.
    """
    from parsl_freetrain.cli.sites import config_of

    main = workflow_at(workflow, arguments or [])
    config, executor = config_of(site)
    ledger = executor.ledger_path
    print(
        f'The ledger is {ledger}; elsewhere, freetrain watch --ledger {ledger} shows what goes on.',
        file=sys.stderr,
    )
    before = None
    with contextlib.suppress(BadInput):  # the run replaces a ledger that cannot be read
        before = _newest(ledger)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        status = _called(main, config, workflow)
    if (run := _newest(ledger)) != before and run is not None:
        _close(ledger, run, as_json)
    return status


def _newest(ledger: Path) -> str | None:
    runs = Journal(ledger, keep_progress=False).history().runs if ledger.is_file() else []
    return runs[-1].name if runs else None


def _called(main: Any, config: Any, workflow: str) -> int:
    try:
        result = main(config)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        said = 'Stopped. Nothing is lost: the same command goes on from the checkpoints.'
        print(f'freetrain: {said}', file=sys.stderr)
        # One more Ctrl-C ends the process at once, and not with a traceback of what it clears up.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return 130
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BadInput:
        raise
    except FreeTrainError as error:
        print(f'freetrain: {error}', file=sys.stderr)
        return 1
    except Exception as error:  # the user's own code: show its traceback
        traceback.print_exc()
        how = type(error).__name__
        print(f'freetrain: The workflow {workflow} ended with {how}.', file=sys.stderr)
        return 1
    return int(bool(result)) if isinstance(result, int) else 0


def _close(ledger: Path, run: str, as_json: bool) -> None:
    found = summary(Journal(ledger, keep_progress=False).history(run))
    if as_json:
        print_json({'ledger': str(ledger), 'run': run, **found})
    else:
        Console().print(ClosingTable(found))
