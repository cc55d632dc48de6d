"""What the commands of the workloads have in common: the folder that a run writes to, and waiting for a trainer."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import wait
from pathlib import Path

from parsl_freetrain.app import Checkpoint, TrainingFuture
from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.protocols import Site

PREVIOUS = 'previous'


def output_folder(out: Path) -> None:
    """Make the folder, if it is not there.

    Raises
    ------
    BadInput
        It cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f'The output folder {out} cannot be made ({error.strerror}); name another one with --out.') from error


def set_aside(out: Path) -> None:
    """Move what is in the folder into a new one in it, ``previous-1`` or the next that is free: nothing is removed that a user may want."""
    found = [path for path in out.iterdir() if not path.name.startswith(f'{PREVIOUS}-')]
    if not found:
        return
    aside = next(path for number in itertools.count(1) if not (path := out / f'{PREVIOUS}-{number}').exists())
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    print(f'What was in {out} was moved to {aside}.')


def refuse_to_wait(future: TrainingFuture, site: Site, advice: str) -> None:
    """To be called while waiting for a trainer; ``advice`` says what would be right.

    Raises
    ------
    FreeTrainError
        If the schedule of holes is over, so that the trainer will get no further.
    """
    if isinstance(site, LocalSite) and site.over_at is not None and time.time() > site.over_at and not future.done():
        raise FreeTrainError(f'The schedule of holes has ended before {future.name!r}, at {future.progress().samples} samples; '
                             f'{advice}.')


def result(future: TrainingFuture, site: Site, advice: str) -> Checkpoint:
    """Wait for a trainer as long as there can be holes for it; ``advice`` says what would be right where there are no more.

    Raises
    ------
    FreeTrainError
        If the schedule of holes ends before.
    """
    while not wait([future], timeout=1.0).done:
        refuse_to_wait(future, site, advice)
    return future.result()
