"""The program ``freetrain``: one verb for each question that a user has.

A verb is a function with Typer annotations, named like its module in this package: ``allocate`` in ``allocate.py``. It
returns its exit status, or nothing for 0. Its module is imported when the verb is called and not for the
list of verbs, so that none has to wait for what another needs.
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from parsl_freetrain import __version__
from parsl_freetrain.core.errors import BadInput, FreeTrainError

VERBS = {
    'allocate': 'Answer allocation problems: which training gets how many nodes?',
    'cancel': 'End a trainer of a live run, with a checkpoint, for good.',
    'doctor': 'Look at what trainings need here and on the nodes; write it into one file.',
    'holes': 'Show the holes that can be had now; nothing is submitted.',
    'logs': 'Show what the ranks of a trainer have printed.',
    'plan': 'Show every block that would be submitted, and its batch script; nothing is sent.',
    'preempt': 'Rehearse a preemption: take the nodes of a running trainer from it.',
    'replay': 'Replay the record of a machine: what would these trainers have trained in its holes?',
    'report': 'Write what a run came to as one HTML file.',
    'run': 'Run a workflow on a site.',
    'status': 'Show what goes on now: trainers, nodes, rates, efficiency, blocks.',
    'watch': 'Show the same, live.',
    'why': 'Say why a trainer has the nodes that it has, or what it waits for.',
}
"""By verb, what the list of verbs says about it."""

# Newer Typers bring their own click, older ones import it; either way this is what all errors of usage derive from.
USAGE_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == 'ClickException')


class Verbs(TyperGroup):
    """Knows the verbs by their names, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = {name: self.get_command(ctx, name) for name in VERBS}  # what it suggests for a slip of the pen
        name, _, rest = super().resolve_command(ctx, args)
        return name, _imported(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            # Whoever read the output has seen enough; nor may Python complain when it flushes at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _imported(verb: str) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(verb)(getattr(import_module(f'parsl_freetrain.cli.{verb.replace("-", "_")}'), verb.replace('-', '_')))
    return typer.main.get_command(alone)


app = typer.Typer(name='freetrain', cls=Verbs, add_completion=False, pretty_exceptions_enable=False,
                  help='Train neural networks on the nodes that supercomputers leave idle.')


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f'freetrain {__version__}')
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[bool, typer.Option('--version', callback=_show_version, is_eager=True, help='Show the version and end.')] = False,
) -> None:
    """Train neural networks on the nodes that supercomputers leave idle."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; the exit status: 0 done, 2 bad input (one sentence on standard error), 1 anything else."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(given or ['--help'], prog_name='freetrain', standalone_mode=False)
    except BadInput as error:
        return _say(str(error), 2)
    except USAGE_ERROR as error:
        sentence = ' '.join(getattr(error, 'format_message', error.__str__)().split())
        where = getattr(getattr(error, 'ctx', None), 'command_path', 'freetrain')
        return _say(f'{sentence.removesuffix(".")}; see {where} --help.', 2)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except FreeTrainError as error:     # such as a scheduler that does not answer
        return _say(f'{str(error).removesuffix(".")}.', 1)
    except Exception as error:
        if os.environ.get('FREETRAIN_DEBUG'):
            traceback.print_exc()
        what = ' '.join(f'{type(error).__name__}: {error}'.split())
        return _say(f'this should not have happened: {what} '
                    f'(please report it to the project, with what FREETRAIN_DEBUG=1 in the environment shows in addition)', 1)
    return status if isinstance(status, int) else 0


def _say(sentence: str, status: int) -> int:
    print(f'freetrain: {sentence}', file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main())
