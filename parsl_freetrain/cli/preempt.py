"""``freetrain preempt``: rehearses a preemption of a trainer."""

import json
from functools import partial
from typing import Annotated

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, journal_at, ledger_at, value
from parsl_freetrain.core.model.checked_values import Seconds, check_value
from parsl_freetrain.executor.requests import Preempt, ask
from parsl_freetrain.report.runs import check_live


def preempt(
    trainer: Annotated[str, typer.Argument(help='Name of a trainer that is running now.')],
    grace: Annotated[
        float, value('S', 'Seconds between the notice and the kill; 0: no notice.')
    ] = 0.0,
    ledger: LedgerOption = None,
    timeout: Annotated[float, value('S', "Maximum seconds to wait for the run's answer.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Rehearse a preemption: end a trainer's running fragment as if its nodes were taken.

    With --grace the fragment gets a notice first, and has that many seconds to save. Then its ranks
    get SIGKILL. The nodes stay, so that the trainer goes on at once, from its last checkpoint.
    Works from any computer that sees the run's file system.
    """
    check_value('--grace', grace, Seconds)
    path, journal = ledger_at(ledger), journal_at(ledger, keep_progress=False)
    check = partial(check_live, journal, 'to preempt')
    check()
    sentence = ask(path, Preempt(trainer, grace), timeout, check)
    answer = {'trainer': trainer, 'grace_s': grace, 'answer': sentence}
    print(json.dumps(answer) if as_json else sentence)
