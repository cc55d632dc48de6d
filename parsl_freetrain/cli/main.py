"""The program ``freetrain``: one verb for each question that a user has.

A verb is a function with Typer annotations, named like its module here: ``allocate`` in
``allocate.py``. It returns its exit status, or None for 0. Only the verb called is imported, and it
imports what takes long (Parsl, pandas, torch) in its body, so that --help is fast.
"""

import errno
import io
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from parsl_freetrain import __version__
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, clean

VERBS = {
    'allocate': 'Answer allocation problems: which training gets how many nodes?',
    'cancel': 'Cancel a trainer of a live run, after a last checkpoint.',
    'doctor': 'Measure what trainings need, here and on the nodes; write it into one file.',
    'export': 'Write the record of runs as tables: an SQLite file, or Parquet files.',
    'holes': 'Show the holes available now. Nothing is submitted.',
    'logs': 'Show what the ranks of a trainer have printed.',
    'new': 'Write a first script, and a site file for this machine.',
    'plan': 'Show every block that would be submitted, and its batch script; nothing is sent.',
    'preempt': 'Rehearse a preemption: take the nodes of a running trainer from it.',
    'rehearse': 'Rehearse a script here: would a cut or other nodes change its result?',
    'replay': 'Replay a recorded machine or run: what would have been trained in its holes?',
    'report': 'Write a report of a run as one HTML file.',
    'run': 'Run a workflow on a site.',
    'status': 'Show the present state of a run: trainers, nodes, rates, efficiency, blocks.',
    'watch': 'Show the state of a run, live.',
    'why': 'Say why a trainer has the nodes that it has, or what it waits for.',
}
"""By verb, its line in the list of verbs."""

# The base class of all usage errors: newer versions of Typer contain their own click.
_BASES = {base.__name__: base for base in typer.BadParameter.__mro__}
USAGE_ERROR: type[Exception] = _BASES['ClickException']


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Verbs(TyperGroup):
    """Lists the verbs by name, and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=VERBS[cmd_name]) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # So that Typer can suggest a name for a misspelt one.
        self.commands = {name: self.get_command(ctx, name) for name in VERBS}
        name, _, rest = super().resolve_command(ctx, args)
        return name, command_of(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
            return status
        except BrokenPipeError:
            _to_nowhere()  # the reader of the output has closed the pipe
            return 0


def command_of(verb: str) -> Any:
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    name = verb.replace('-', '_')
    alone.command(verb)(getattr(import_module(f'parsl_freetrain.cli.{name}'), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name='freetrain',
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    help='Train neural networks on the nodes that supercomputers leave idle.',
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f'freetrain {__version__}')
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            '--version', callback=_show_version, is_eager=True, help='Show the version and end.'
        ),
    ] = False,
) -> None:
    """Train neural networks on the nodes that supercomputers leave idle."""


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Exit status 0: success, 2: bad input (one sentence), 1: any other error."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack some characters
            stream.reconfigure(errors='replace')
    try:
        status = app(given or ['--help'], prog_name='freetrain', standalone_mode=False)
    except BadInput as error:
        return _say(str(error), 2)
    except USAGE_ERROR as error:
        said = ' '.join(getattr(error, 'format_message', error.__str__)().split()).removesuffix('.')
        asked: Any = getattr(error, 'ctx', None)
        where = asked.command_path if asked else 'freetrain'
        option = getattr(error, 'option_name', None)  # one that the verb does not have
        if option and any(each.name == 'arguments' for each in asked.command.params):
            said += f"; a script's own options stand after --, as in {where} FILE -- {option}"
        return _say(f'{said}; see {where} --help.', 2)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except FreeTrainError as error:  # such as a scheduler that does not answer
        return _say(f'{str(error).removesuffix(".")}.', 1)
    except OSError as error:
        if error.errno in _FULL:
            _to_nowhere()
            return _say(f'the output cannot be written: {error.strerror}', 1)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)
    return status if isinstance(status, int) else 0


def _unexpected(error: Exception) -> int:
    if os.environ.get('FREETRAIN_DEBUG'):
        traceback.print_exc()
    what = ' '.join(f'{type(error).__name__}: {error}'.split())
    return _say(
        f'this should not have happened: {what} (please report it to the project, with what '
        'FREETRAIN_DEBUG=1 in the environment shows in addition)',
        1,
    )


def _to_nowhere() -> None:
    """Send what is still to be flushed to nowhere, or Python complains about it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(sentence: str, status: int) -> int:
    seen = clean(sentence, keep='\n')
    print(f'freetrain: {seen}', file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main())
