"""The kinds of faults of a chaos run, and how each is caused."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.directories import directories
from parsl_freetrain.training.checkpoint.manifest import MANIFEST, MARKER, is_committed
from tests.chaos import limits, points
from tests.chaos.disks import full_inodes
from tests.chaos.training import PAUSE_S, SILENCES
from tests.support import file_system_shim as fs
from tests.support.damage import corrupt_checkpoint, full_disk, half_write_checkpoint
from tests.support.waiting import LIMIT_S, looks

if TYPE_CHECKING:
    from tests.chaos.monkey import Run

PATIENCE_S = 15.0  # for a rank to reach a point where a fault waits for it

Fault = Callable[['Run', random.Random], object]


def _one(run: Run, draw: random.Random, kind: str, number: signal.Signals) -> None:
    draw.choice(run.of_kind(kind) or [psutil.Process(2**22)]).send_signal(number)


def _all(run: Run, draw: random.Random, kind: str) -> None:
    for process in run.of_kind(kind) or [psutil.Process(2**22)]:
        process.kill()


def _paused(run: Run, draw: random.Random, kind: str) -> None:
    process = draw.choice(run.of_kind(kind) or [psutil.Process(2**22)])
    process.suspend()
    time.sleep(PAUSE_S)
    process.resume()


def _zombie(run: Run, draw: random.Random) -> None:
    """A node stands still until another fragment has begun, and then goes on with its piece."""
    block = draw.choice(run.of_kind('block') or [psutil.Process(2**22)])
    stopped, fragments = [block, *block.children(recursive=True)], run.fragments()
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for _ in looks(PATIENCE_S):
        if run.fragments() > fragments:
            break
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _submitting(run: Run, draw: random.Random, number: signal.Signals) -> None:
    if run.process is None or not run.running():
        raise FileNotFoundError
    run.process.send_signal(number)
    if number == signal.SIGSTOP:
        time.sleep(PAUSE_S)
        run.process.send_signal(signal.SIGCONT)
        return
    try:
        run.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        run.process.send_signal(signal.SIGUSR2)  # for its stacks
        time.sleep(1.0)
        raise AssertionError(f'it has not ended within {LIMIT_S:g} s after {number!r}') from None
    run.start()


def _newest(run: Run) -> Path:
    """The newest checkpoint, if there is one before it."""
    found = [folder for folder in directories(run.store) if is_committed(folder)]
    if len(found) < 2:
        raise FileNotFoundError
    return found[-1]


def _ledger(run: Run) -> Path:
    return run.folder / 'checkpoints' / 'ledger.journal'


def _full_disk(run: Run, draw: random.Random) -> None:
    with full_disk(run.folder / 'checkpoints'):
        time.sleep(1.0)


def _full_inodes(run: Run, draw: random.Random) -> None:
    with full_inodes(run.folder / 'checkpoints'):
        time.sleep(1.0)


def _ordered(run: Run, draw: random.Random, kind: str) -> None:
    """Leave a file for whoever causes the fault, and wait until it is taken."""
    order = run.orders / kind
    order.touch()
    place = points.FAULTS[kind][0] if kind in points.FAULTS else ''
    if place in ('function begins', 'prepared', 'leaving'):
        _one(run, draw, 'block', signal.SIGKILL)
    for _ in looks(PATIENCE_S):
        if not order.exists():
            return
    order.unlink()  # raises FileNotFoundError if it was taken at the last moment


def _trouble(run: Run, draw: random.Random, calls: int, error: int) -> None:
    """The file system of the trainer's folder is in trouble for some seconds."""
    if run.shim is None or not run.store.exists():
        raise FileNotFoundError
    with run.shim.trouble(calls, error, f'/{run.store.name}/', draw.choice([0.05, 0.5, 1.0])):
        time.sleep(PAUSE_S)


def _clock(run: Run, draw: random.Random, sign: int) -> None:
    """The clock of a node differs from now on."""
    if run.shim is None:
        raise FileNotFoundError
    node = f'slot{draw.randrange(run.nodes):02d}'
    run.shim.set_clock(node, sign * draw.choice([3, 20, 600, 86_400]))


def _cut_off(run: Run, draw: random.Random) -> None:
    """The network of a node, which is a computer, is lost for some seconds."""
    node = draw.choice(run.computers[1:])
    node.cut_off()
    try:
        time.sleep(draw.choice([PAUSE_S, 5 * PAUSE_S]))
    finally:
        node.join_again()


def _limited(run: Run, draw: random.Random, kind: str, most: int) -> None:
    """All processes of the run together get no more than a little for some seconds."""
    with limits.limited(kind, most, [process.pid for process in run.processes()]):
        time.sleep(PAUSE_S)


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP
KINDS: dict[str, tuple[int, Fault]] = {
    'rank': (8, partial(_one, kind='rank', number=_KILL)),
    'stop rank': (2, partial(_one, kind='rank', number=_STOP)),
    'notice': (2, partial(_one, kind='rank', number=signal.SIGTERM)),
    'all ranks': (1, partial(_all, kind='rank')),
    'manager': (4, partial(_one, kind='manager', number=_KILL)),
    'stop manager': (1, partial(_one, kind='manager', number=_STOP)),
    'manager paused': (1, partial(_paused, kind='manager')),
    'all managers': (1, partial(_all, kind='manager')),
    'worker': (2, partial(_one, kind='worker', number=_KILL)),
    'stop worker': (1, partial(_one, kind='worker', number=_STOP)),
    'block': (3, partial(_one, kind='block', number=_KILL)),
    'zombie': (1, _zombie),
    'stop block': (1, partial(_one, kind='block', number=_STOP)),
    'all blocks': (1, partial(_all, kind='block')),
    'interchange': (1, partial(_one, kind='interchange', number=_KILL)),
    'interchange paused': (1, partial(_paused, kind='interchange')),
    'submitting process': (2, partial(_submitting, number=_KILL)),
    'submitting process interrupted': (1, partial(_submitting, number=signal.SIGINT)),
    'submitting process paused': (1, partial(_submitting, number=_STOP)),
    'corrupt checkpoint': (
        2,
        lambda run, draw: corrupt_checkpoint(run.store, seed=draw.randrange(1000), bits=3),
    ),
    'half-written checkpoint': (2, lambda run, draw: half_write_checkpoint(run.store)),
    'checkpoint deleted': (1, lambda run, draw: shutil.rmtree(_newest(run))),
    'marker deleted': (1, lambda run, draw: (_newest(run) / MARKER).unlink()),
    'table cut': (1, lambda run, draw: os.truncate(_newest(run) / MANIFEST, 100)),
    'full disk': (2, _full_disk),
    'full inodes': (2, _full_inodes),
    'damaged ledger': (
        2,
        lambda run, draw: os.truncate(_ledger(run), _ledger(run).stat().st_size // 2),
    ),
    'ledger overwritten': (1, lambda run, draw: _ledger(run).write_bytes(b'x' * 5000)),
    'file system fails': (2, partial(_trouble, calls=fs.ALL, error=errno.EIO)),
    'file system full': (1, partial(_trouble, calls=fs.WRITE | fs.SYNC, error=errno.ENOSPC)),
    'stale handles': (1, partial(_trouble, calls=fs.OPEN | fs.READ, error=errno.ESTALE)),
    'short reads and writes': (1, partial(_trouble, calls=fs.READ | fs.WRITE, error=0)),
    "a node's clock ahead": (1, partial(_clock, sign=1)),
    "a node's clock behind": (1, partial(_clock, sign=-1)),
    'network cut off': (1, _cut_off),
    'no more processes': (1, partial(_limited, kind='pids', most=2)),
    'little memory': (1, partial(_limited, kind='memory', most=150 << 20)),
    **{kind: (1, partial(_ordered, kind=kind)) for kind in (*SILENCES, *points.FAULTS)},
}
"""How often each kind is caused relative to the others, and how."""

ON_SMALL_DISK, IN_GROUPS = ('full disk', 'full inodes'), ('no more processes', 'little memory')
ON_COMPUTERS = ('network cut off',)
IN_ROUNDS = tuple(one for one, (where, _) in points.FAULTS.items() if where[:5] == 'outer')
NOT_IN_ROUNDS = (  # a replica that has gone on does not train a damaged piece once more
    'corrupt checkpoint', 'checkpoint deleted', 'marker deleted', 'table cut', *ON_SMALL_DISK,
    'kill in an exchange', 'kill after an exchange', 'stop in an exchange', 'kill in a handover',
)  # fmt: skip
WITH_SHIM = (
    'file system fails', 'file system full', 'stale handles', 'short reads and writes',
    "a node's clock ahead", "a node's clock behind",
)  # fmt: skip


def strike(run: Run, draw: random.Random, kind: str) -> bool:
    """Cause a fault; False if there was nothing to strike."""
    try:
        KINDS[kind][1](run, draw)
    except (psutil.NoSuchProcess, FileNotFoundError, BadInput):
        return False
    return True
