"""Which folders of a run are refused, and what is made private."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.ownership import is_ours, refuse_foreign, refuse_replaceable

_RUN_DIR = 'run_dir of parsl.Config'


def refuse_unquotable(logdir: str) -> None:
    """Refuse (BadInput) a folder that Parsl's single-quoted, formatted commands cannot hold."""
    logs = os.path.abspath(logdir)
    if set(logs) & set("'{}") or not logs.isprintable():
        raise BadInput(
            f"Parsl's folder for this run is {logs!r}, and the command that starts the nodes of a "
            'block cannot hold single quotes, braces and line ends; give parsl.Config a run_dir '
            'without them.'
        )


def keep_others_out(checkpoint_dir: Path, run_dir: str) -> None:
    """Refuse folders that other users can change (BadInput), and make Parsl's folder of this run,
    with its log, private: what is in it (scripts, keys) is trusted by its name.

    Members of a group may replace a checkpoint_dir, since folders of projects are theirs: no
    program in it is run, and whoever reads from it looks first whose it is.
    """
    folder = checkpoint_dir.absolute()
    refuse_replaceable(folder, 'checkpoint_dir', group_may=True)
    refuse_foreign(folder, 'checkpoint_dir')
    run = Path(run_dir).absolute()
    refuse_replaceable(run, _RUN_DIR)
    with suppress(OSError):
        run.chmod(0o700)
    refuse_foreign(run, _RUN_DIR)
    for path in run.iterdir():
        # Before it was private, others may have been able to write to it: Parsl goes by the umask.
        if not is_ours(owner := path.lstat().st_uid, run):
            raise BadInput(
                f'Another user (id {owner}) has written {path}, in the {_RUN_DIR}: give it a '
                'folder to which only you can write.'
            )
