"""Which folders of a run are refused, and what is made private."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.ownership import refuse_foreign, refuse_replaceable


def refuse_unquotable(logdir: str) -> None:
    """Refuse a folder of Parsl whose name its commands cannot hold: they are in single quotes, and
    formatted twice. Raises BadInput.
    """
    logs = os.path.abspath(logdir)
    if set(logs) & set("'{}") or not logs.isprintable():
        raise BadInput(
            f"Parsl's folder for this run is {logs!r}, and the command that starts the nodes of a "
            'block cannot hold single quotes, braces and line ends; give parsl.Config a run_dir '
            'without them.'
        )


def keep_others_out(checkpoint_dir: Path, run_dir: str) -> None:
    """Refuse a checkpoint folder that other users can change. Make Parsl's folder of this run
    private, with its log. Raises BadInput if another user can change the folder, or one above it.
    """
    folder = checkpoint_dir.absolute()
    refuse_replaceable(folder, 'checkpoint_dir')
    refuse_foreign(folder, 'checkpoint_dir')
    with suppress(OSError):
        os.chmod(run_dir, 0o700)
