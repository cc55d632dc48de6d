"""Shared by the workflows' commands: the output folder of a run, and waiting for a trainer."""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import wait
from pathlib import Path

from parsl_freetrain import BadInput, Checkpoint, FreeTrainError, LocalSite, TrainingFuture
from parsl_freetrain.executor.run_lock import FILE as LOCK
from parsl_freetrain.executor.run_lock import refuse_live
from parsl_freetrain.sites.protocols import Site

PREVIOUS = 'previous'


def add_site_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--site',
        metavar='NAME|FILE',
        help=(
            'a machine with a batch scheduler: a name in site_configs/, or a .py or .toml file '
            '(default: this computer)'
        ),
    )


def output_folder(out: Path) -> None:
    """Create the folder, if it does not exist.

    Raises
    ------
    BadInput
        It cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f'The output folder {out} cannot be made ({error.strerror}); name another '
            'one with --out.'
        ) from error


def set_aside(out: Path) -> None:
    """Move the contents of the folder into a new subfolder, ``previous-1`` or the next free number,
    so that nothing is lost.

    Raises
    ------
    BadInput
        A live run uses them.
    """
    found = [path for path in out.iterdir() if not path.name.startswith(f'{PREVIOUS}-')]
    if not found:
        return
    for path in found:
        for lock in path.rglob(LOCK):
            refuse_live(lock.parent)
    aside = next(
        path for number in itertools.count(1) if not (path := out / f'{PREVIOUS}-{number}').exists()
    )
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    print(f'What was in {out} was moved to {aside}.')


def refuse_to_wait(future: TrainingFuture, site: Site, advice: str) -> None:
    """Check the schedule of holes while waiting for a trainer; errors end with ``advice``.

    Raises
    ------
    FreeTrainError
        If the schedule of holes is over, so that the trainer cannot continue.
    """
    if (
        isinstance(site, LocalSite)
        and site.over_at is not None
        and time.time() > site.over_at
        and not future.done()
    ):
        raise FreeTrainError(
            f'The schedule of holes has ended before {future.name!r}, at '
            f'{future.progress().samples} samples; '
            f'{advice}.'
        )


def result(future: TrainingFuture, site: Site, advice: str) -> Checkpoint:
    """Wait for a trainer as long as the schedule of holes lasts; errors end with ``advice``.

    Raises
    ------
    FreeTrainError
        If the schedule of holes ends first.
    """
    while not wait([future], timeout=1.0).done:
        refuse_to_wait(future, site, advice)
    return future.result()
