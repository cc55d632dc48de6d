"""``freetrain cancel``: end a trainer of a live run, with a checkpoint."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, ledger_at
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.report.names import trainer_named


def cancel(
    trainer: Annotated[
        str | None, typer.Argument(help='Name of a trainer that is not over.')
    ] = None,
    every: Annotated[bool, typer.Option('--all', help='All trainers that are not over.')] = False,
    ledger: LedgerOption = None,
    timeout: Annotated[
        float, typer.Option(metavar='S', help="Maximum seconds to wait for the run's answer.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Cancel a trainer, after a last checkpoint: its future is cancelled, its nodes go to others.

    Works from any computer that sees the run's file system. The checkpoints stay; the same program
    run again goes on from them.
    """
    # Parsl is slow to import, and the list of verbs does not need it.
    from parsl_freetrain.executor.requests import Cancel, ask
    from parsl_freetrain.ledger.reader import Reader
    from parsl_freetrain.ledger.rows import FINAL_STATES
    from parsl_freetrain.report.life import check_live

    if every == (trainer is not None):
        raise BadInput('Name one trainer, or give --all.')
    path = ledger_at(ledger)
    with Reader(path) as reader:

        def check() -> None:
            check_live(reader, 'to cancel')

        def states() -> dict[str, str]:
            history = reader.history()
            return {
                row.name: row.state for row in history.trainers if row.run == history.runs[-1].id
            }

        check()
        if trainer is not None:
            name = trainer_named(states(), trainer)
            answers = {name: ask(path, Cancel(name), timeout, check)}
        else:
            answers = {}
            for name in [name for name, state in states().items() if state not in FINAL_STATES]:
                try:
                    answers[name] = ask(path, Cancel(name), timeout, check)
                except BadInput:
                    if states()[name] not in FINAL_STATES:
                        raise
                    answers[name] = f'Trainer {name!r} is over meanwhile ({states()[name]}).'
    if as_json:
        print(json.dumps([{'trainer': name, 'answer': answer} for name, answer in answers.items()]))
    else:
        print('\n'.join(answers.values()) or 'All trainers are over already.')
