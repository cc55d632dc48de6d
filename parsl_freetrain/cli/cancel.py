"""``freetrain cancel``: end a trainer of a live run, with a checkpoint."""

import json
from functools import partial
from typing import Annotated

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, flag, journal_at, ledger_at, value
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import Training
from parsl_freetrain.executor.requests import Cancel, ask
from parsl_freetrain.report.runs import check_live, trainer_named


def cancel(
    trainer: Annotated[
        str | None, typer.Argument(help='Name of a trainer that is not over.')
    ] = None,
    every: Annotated[bool, flag('All trainers that are not over.', '--all')] = False,
    ledger: LedgerOption = None,
    timeout: Annotated[float, value('S', "Maximum seconds to wait for the run's answer.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Cancel a trainer, after a last checkpoint: its future is cancelled, its nodes go to others.

    Works from any computer that sees the run's file system. The checkpoints stay; the same program
    run again goes on from them.
    """
    if every == (trainer is not None):
        raise BadInput('Name one trainer, or give --all.')
    path, journal = ledger_at(ledger), journal_at(ledger, keep_progress=False)
    check = partial(check_live, journal, 'to cancel')

    def trainings() -> dict[str, Training]:
        return journal.history().runs[-1].trainers

    check()
    if trainer is not None:
        name = trainer_named(trainings(), trainer)
        answers = {name: ask(path, Cancel(name), timeout, check)}
    else:
        answers = {}
        for name in [name for name, one in trainings().items() if not one.over]:
            try:
                answers[name] = ask(path, Cancel(name), timeout, check)
            except BadInput:
                now = trainings()[name]
                if not now.over:
                    raise
                answers[name] = f'Trainer {name!r} is over meanwhile ({now.state}).'
    if as_json:
        print(json.dumps([{'trainer': name, 'answer': answer} for name, answer in answers.items()]))
    else:
        print('\n'.join(answers.values()) or 'All trainers are over already.')
