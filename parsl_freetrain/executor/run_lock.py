"""One live run for each checkpoint folder, and the folders of a run that are refused."""

import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput, of_file
from parsl_freetrain.host.files import make_dir, write_new
from parsl_freetrain.host.ownership import is_ours, refuse_foreign, refuse_replaceable
from parsl_freetrain.training.process import block_lease

logger = logging.getLogger(__name__)

FILE = 'run.json'
OURS = ('environment', 'logs', 'requests', FILE)  # beside the folders of trainers
BEAT_S = 20.0  # seconds between two signs of life of a run
CLAIM_S = 10.0  # maximum seconds to wait for another run that begins in the same folder
LOOK_S = 0.1
SILENT_S = 90.0  # seconds without one after which a run on another computer counts as dead


def check_name(name: str) -> None:
    """Refuse a trainer's name that cannot also be a folder's name; raises BadInput."""
    if not re.fullmatch(r'[A-Za-z0-9_][A-Za-z0-9._-]*', name):
        raise BadInput(
            f'{name!r} cannot name a trainer: it names a folder too, so use letters, digits, dots, '
            'dashes and underscores, and begin with no dot and no dash.'
        )
    if name in OURS or name.startswith('ledger.journal'):
        raise BadInput(
            f'{name!r} cannot name a trainer, since a run keeps something else under this name in '
            'its checkpoint_dir; give another trainer_name.'
        )


class RunLock:
    """Names the live run in its folder, and touches the file; ``lost``: why this run must end."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path = folder.absolute() / FILE
        self._run = run
        self._touched_at = 0.0
        self.lost = ''

    def take_folder(self) -> None:
        """Claim the folder; BadInput if another live run has it, or it cannot be written."""
        remedy = 'name a folder that you can write to and that the compute nodes see'
        with of_file(f'checkpoint_dir {self._path.parent} cannot be written', remedy):
            make_dir(self._path.parent)
            with _alone(self._path):
                refuse_live(self._path.parent)
                block_lease.write_holder(self._path, block_lease.this_process(self._run))
        holder = block_lease.read_holder(self._path)
        if holder is None or holder.run != self._run:
            raise BadInput(f'Another run began in {self._path.parent} at the same moment.')

    def free_folder(self) -> None:
        block_lease.release(self._path, self._run)

    def take(self, event: ev.Event) -> None:
        if isinstance(event, ev.OffersSeen) and not (0 <= event.at - self._touched_at < BEAT_S):
            self._touched_at = event.at
            with suppress(OSError, BadInput):
                self._give_a_sign()

    def _give_a_sign(self) -> None:
        try:
            other = block_lease.read_holder(self._path)
        except BadInput:
            block_lease.write_holder(self._path, block_lease.this_process(self._run))
            return
        if other is None or other.run == self._run:
            os.utime(self._path)
        elif not self.lost:
            self.lost = (
                f'process {other.pid} on {other.host} has taken the checkpoint_dir '
                f'{self._path.parent}, as this run gave no sign of life for {SILENT_S:g} s'
            )

    def flush(self) -> None:
        """Nothing is ever pending."""


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Between two runs that look at the file and write it, one waits for the other."""
    claim = path.with_name(f'.{path.name}.claim')
    for _ in range(round(CLAIM_S / LOOK_S)):
        try:
            write_new(claim, b'', durable=False)
        except FileExistsError:
            time.sleep(LOOK_S)
        else:
            break
    else:
        claim.unlink(missing_ok=True)
        raise BadInput(
            f'Another run begins in {path.parent}, or was killed as it began; try again.'
        )
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def refuse_live(folder: Path) -> None:
    """Check that no live run has a checkpoint folder. Raises BadInput if one has."""
    path = folder / FILE
    try:
        other = block_lease.read_holder(path)
    except BadInput:
        # If a run lives whose file it was, it gives the folder up at its next sign of life, and its
        # late checkpoints are fenced.
        aside, other = path.with_name(f'{path.name}.damaged-{secrets.token_hex(4)}'), None
        path.rename(aside)
        said = '%s is damaged, so which run has the folder is unknown; kept as %s'
        logger.warning(said, path, aside)
    if other is not None and (left_s := _lives_s(other, path)) > 0:
        raise BadInput(_refusal(other, path, left_s))


def _lives_s(other: block_lease.Holder, path: Path) -> float:
    """Seconds for which another run must be taken for alive; 0: it is dead."""
    if other.host == block_lease.this_process('').host:
        return SILENT_S if other.lives() else 0.0
    # Its process cannot be seen from here. Both times are the file server's.
    probe = path.with_name(f'.{FILE}-{os.getpid()}')
    probe.touch()
    try:
        silent_s = probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()
    return max(0.0, SILENT_S - silent_s)


def _refusal(other: block_lease.Holder, path: Path, left_s: float) -> str:
    begun = time.strftime('%H:%M:%S', time.localtime(path.stat().st_mtime))
    here = other.host == block_lease.this_process('').host
    if here and other.pid == os.getpid():
        return (
            f'Executor {other.run.partition(" ")[2]!r} of this program has the checkpoint_dir '
            f'{path.parent}; give each FreeTrainExecutor a checkpoint_dir of its own.'
        )
    process = f'process {other.pid} on {other.host}'
    gone = (
        f' (Its last sign of life was at {begun}; if that process is gone, the folder is free in '
        f'{left_s:.0f} s.)'
    )
    return (
        f'A run with the checkpoint_dir {path.parent} is alive: {process}; wait for its end, or '
        f'give another checkpoint_dir.{"" if here else gone}'
    )


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
    """Refuse folders that other users can change, and make Parsl's folder of this run private."""
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
