"""``freetrain rehearse``: rehearses the trainings that a script calls."""

import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from parsl_freetrain.cli.workflow import has_main, workflow_at
from parsl_freetrain.core.model.errors import BadInput


def rehearse(
    script: Annotated[str, typer.Argument(help='A Python file that calls trainings.')],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments, after --.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=4, help='Number of global batches that each form trains.')
    ] = 12,
) -> int:
    """Run a script on this computer, and rehearse each training where the script calls it: some
    steps undisturbed, then stopped and continued, killed, on two and three ranks, with and without
    DataLoader workers. A table says what differs, from which step on and why; nothing is submitted.
    The status is 1 if anything differs.

    The call returns a checkpoint without a path, so the script ends where it needs trained weights.
    A function main(config) gets a configuration of threads.
    """
    from parsl.config import Config
    from parsl.executors import ThreadPoolExecutor

    from parsl_freetrain import app
    from parsl_freetrain.executor.trainer.future import TrainingFuture
    from parsl_freetrain.rehearsal import Rehearsal

    path, done = Path(script), dict[Any, Rehearsal]()
    if not path.is_file():
        raise BadInput(f'There is no script {script}; name a Python file.')

    def instead(trainer: app.FreeTrainApp, args: Any, kwargs: Any) -> TrainingFuture:
        if trainer.function not in done:
            done[trainer.function] = trainer.rehearse(*args, steps=steps, **kwargs)
            print(done[trainer.function], flush=True)
        future = TrainingFuture(trainer.name)
        future._settle_finished(done[trainer.function].checkpoint)
        return future

    sys.argv = [script, *(arguments or [])]
    sys.path.insert(0, str(path.absolute().parent))
    app.instead_of_calls = instead
    try:
        if has_main(path):
            workflow_at(script, arguments or [])(Config(executors=[ThreadPoolExecutor()]))
        else:
            runpy.run_path(script, run_name='__main__')
    except BadInput:
        raise
    except Exception as error:
        if not done:
            raise BadInput(
                f'{script} ended before a training: {type(error).__name__}: {error}.'
            ) from error
        print(
            f'{script} ended with {type(error).__name__}: {error} (after a rehearsal there are no '
            'weights, and other apps of Parsl need a configuration that the script loads).',
            file=sys.stderr,
        )
    finally:
        app.instead_of_calls = None
    if not done:
        raise BadInput(f'{script} has called no training; call the decorated function in it.')
    return int(not all(one.same for one in done.values()))
