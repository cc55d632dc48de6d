"""The program ``freetrain``: one verb for each question that a user has."""

from __future__ import annotations

import sys

import click
import typer

from parsl_freetrain.core.errors import BadInput

app = typer.Typer(name='freetrain', no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help='Train neural networks on the nodes that supercomputers leave idle.')


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; the exit status: 0 done, 2 bad input (one sentence on standard error), 1 anything else."""
    try:
        status = app(arguments, prog_name='freetrain', standalone_mode=False)
    except BadInput as error:
        print(f'freetrain: {error}', file=sys.stderr)
        return 2
    except click.ClickException as error:
        print(f'freetrain: {error.format_message()}', file=sys.stderr)
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        sys.stderr.close()
        return 0
    return status if isinstance(status, int) else 0
