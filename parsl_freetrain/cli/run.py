"""``freetrain run``: a workflow on a site."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import Annotated, Any, Optional

import typer

from parsl_freetrain.cli.where import JsonOption
from parsl_freetrain.core.errors import BadInput, FreeTrainError


def run(
    workflow: Annotated[str, typer.Argument(help='A Python file or a module that has a function main(config).')],
    arguments: Annotated[Optional[list[str]], typer.Argument(help="The workflow's own arguments, behind --.")] = None,  # noqa: UP045
    site: Annotated[str, typer.Option(metavar='NAME|FILE', help='local, a name in site_configs/, or a .py or .toml file.')] = 'local',
    as_json: JsonOption = False,
) -> int:
    """Run a workflow: its main(config) is called with the Parsl configuration of the site.

    It does the rest itself: with parsl.load(config) it loads Parsl, calls its apps and waits for them. With --json what it
    prints goes to standard error, and the closing summary to standard output.
    """
    from parsl_freetrain.cli.sites import config_of  # the help is there without Parsl
    from parsl_freetrain.cli.workflow import workflow_at

    main = workflow_at(workflow, arguments or [])
    config, executor = config_of(site)
    ledger = executor.ledger_path
    print(f'The ledger is {ledger}; elsewhere, freetrain watch --ledger {ledger} shows what goes on.', file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        status = _called(main, config, workflow)
    if ledger.is_file():
        _close(ledger, as_json)
    return status


def _called(main: Any, config: Any, workflow: str) -> int:
    try:
        result = main(config)
    except KeyboardInterrupt:
        print('freetrain: Stopped. Nothing is lost: the same command goes on from the checkpoints.', file=sys.stderr)
        return 130
    except BadInput:
        raise
    except FreeTrainError as error:
        print(f'freetrain: {error}', file=sys.stderr)
        return 1
    except Exception as error:   # the user's own code: where it was is what the user needs
        traceback.print_exc()
        print(f'freetrain: The workflow {workflow} ended with {type(error).__name__}.', file=sys.stderr)
        return 1
    return int(bool(result)) if isinstance(result, int) else 0


def _close(ledger: Any, as_json: bool) -> None:
    from rich.console import Console

    from parsl_freetrain.cli.live import closing_table
    from parsl_freetrain.ledger.reader import Reader
    from parsl_freetrain.ledger.summary import summary

    with Reader(ledger) as reader:
        runs = reader.story().runs
        if not runs:
            return
        found = summary(reader, run=runs[-1].name)
    if as_json:
        print(json.dumps({'ledger': str(ledger), 'run': runs[-1].name, **found}))
    else:
        Console().print(closing_table(found))
