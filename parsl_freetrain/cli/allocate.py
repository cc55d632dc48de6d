"""``freetrain allocate``: one problem per line of JSON in, one answer per line out."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer

from parsl_freetrain.cli.where import flag, value
from parsl_freetrain.core.allocation.explain import explain
from parsl_freetrain.core.allocation.objectives import FIELDS, METRICS, Metric, objective_named
from parsl_freetrain.core.allocation.problem import Allocator, Answer
from parsl_freetrain.core.allocation.problem_document import check, decode, problem_of
from parsl_freetrain.core.allocation.solvers import SolverName
from parsl_freetrain.core.model.checked_values import PositiveSeconds, check_value
from parsl_freetrain.core.model.errors import BadInput, of_file
from parsl_freetrain.solver import allocator_named, close_allocator


def allocate(
    file: Annotated[
        str,
        typer.Argument(
            metavar='FILE|-', help='Problems, one JSON object per line; - reads standard input.'
        ),
    ],
    solver: Annotated[
        SolverName, value('|'.join(SolverName), 'auto: the fastest exact one for each problem.')
    ] = SolverName.AUTO,
    time_limit: Annotated[
        float,
        value(
            'S', 'Maximum seconds for one problem; then the best allocation found is the answer.'
        ),
    ] = 10.0,
    objective: Annotated[
        str | None,
        value(
            'NAME|EXPR',
            f'The objective, in place of what the problems say: {", ".join(METRICS)}, or an '
            f'expression of {", ".join(FIELDS)}.',
        ),
    ] = None,
    reasons: Annotated[
        bool, flag('Explain: gains, costs, and the next best choice for each trainer.', '--explain')
    ] = False,
) -> int:
    """Answer allocation problems: which training gets how many nodes?

    One answer per line. For a problem that cannot be used there is a sentence on standard error
    in place of an answer, and the exit status is 2.
    """
    check_value('--time-limit', time_limit, PositiveSeconds)
    metric = None if objective is None else objective_named(objective)
    status = 0
    allocator = allocator_named(solver.value, time_limit_s=time_limit)
    # The alternative is another problem's optimum; the dynamic programme may not apply.
    name = 'milp' if solver is SolverName.MILP else 'auto'
    exact = allocator_named(name, time_limit_s=time_limit) if reasons else None
    with ExitStack() as stack:
        for each in filter(None, (allocator, exact)):
            stack.callback(close_allocator, each)
        for number, raw in _lines(file):
            try:
                answer = _answer(number, raw, metric, allocator, exact)
                print(json.dumps(answer, allow_nan=False), flush=True)
            except BadInput as error:
                where = 'standard input' if file == '-' else file
                print(f'freetrain: {where}, line {number}: {error}', file=sys.stderr, flush=True)
                status = 2
    return status


def _answer(
    number: int, raw: bytes, metric: Metric | None, allocator: Allocator, exact: Allocator | None
) -> dict[str, Any]:
    """The document that answers a line; a refusal names the problem's id if it can be read."""
    try:
        text = raw.removeprefix(b'\xef\xbb\xbf' if number == 1 else b'').rstrip().decode()
    except UnicodeDecodeError as error:
        raise BadInput(f'it is not UTF-8 at byte {error.start + 1}.') from None
    stated = decode(text)
    try:
        line = check(stated)
        problem = problem_of(line, metric)
        answer = allocator.allocate(problem)
    except BadInput as error:
        known = f'problem {stated["id"]!r}: ' if isinstance(stated.get('id'), str | int) else ''
        raise BadInput(f'{known}{error}') from None
    said = _said(number if line.id is None else line.id, answer, line.blocks is not None)
    if exact:
        found = asdict(explain(problem, answer, exact))
        trainers = {each.pop('trainer'): each for each in found['reasons']}
        said['explain'] = {'trainers': trainers, 'limits': list(found['limits'])}
    return said


def _said(name: str | int, answer: Answer, by_block: bool) -> dict[str, Any]:
    return {
        'id': name,
        **{f: getattr(answer, f) for f in ('status', 'objective', 'bound', 'gap', 'solver')},
        'seconds': round(answer.seconds, 6),
        'allocation': {trainer: answer.by_block.get(trainer, {}) for trainer in answer.allocation}
        if by_block
        else answer.allocation,
    }


def _lines(file: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    with (
        of_file(f'The problems cannot be read from {file!r}', 'give a file, or - for the input'),
        nullcontext(sys.stdin.buffer) if file == '-' else open(file, 'rb') as source,
    ):
        for number, raw in enumerate(source, 1):
            if raw.strip():
                yield number, raw
