"""A file system that is in trouble for some seconds ends no training and costs no retry."""

import errno
import os
import sys
import time
from pathlib import Path

import pytest

from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.trainer_end import STORAGE_S
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Trainer
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.checkpoint.manifest import is_committed
from parsl_freetrain.training.comm.device_faults import storage_trouble
from tests.support import file_system_shim as fs
from tests.support.programs import Program
from tests.support.waiting import LIMIT_S, wait_until

PROGRAM = """
import sys
from pathlib import Path
from parsl_freetrain import Checkpoints, LocalSite, Reproducible, freetrain_app
from tests.support.training import fit, freetrain
with freetrain(Path(sys.argv[1]), LocalSite(nodes=1)):
    train = freetrain_app(
        max_nodes=1, total_epochs=40, mode=Reproducible(), checkpoints=Checkpoints(every_s=0.3)
    )(fit)
    print(train(pause_s=0.01, trainer_name='aa').result().samples)
"""
TROUBLES = [(fs.WRITE | fs.SYNC, errno.ENOSPC, '/aa/ckpt'), (fs.ALL, errno.EIO, '/aa/')]
"""It is full, and it is gone."""


@pytest.mark.skipif(fs.compiler() is None, reason='needs a C compiler')
def test_a_training_waits_for_its_file_system(tmp_path: Path) -> None:
    shim = fs.Shim(tmp_path)
    store = tmp_path / 'checkpoints' / 'aa'
    with (tmp_path / 'output').open('wb') as output:
        program, own = [sys.executable, '-c', PROGRAM, tmp_path], shim.environment
        process = Program(program, more_env=own, stdout=output, stderr=output)
    try:
        for calls, error, path in TROUBLES:
            before = {*store.glob('ckpt-*')}
            wait_until(lambda: process.poll() or any(map(is_committed, store.glob('ckpt-*'))))
            wait_until(lambda: process.poll() or {*store.glob('ckpt-*')} - before)  # noqa: B023
            with shim.trouble(calls, error, path):
                said = wait_until(lambda: process.poll() is not None or _waits(tmp_path))
                assert isinstance(said, str), (tmp_path / 'output').read_text()
                time.sleep(1.0)
            assert os.strerror(error) in said
            wait_until(lambda: process.poll() is not None or not _waits(tmp_path))
        status = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
        shim.close()
    said = (tmp_path / 'output').read_text()
    assert (status, said.splitlines()[-1]) == (0, str(40 * 96)), said
    assert not list(store.glob('bad/*')), 'no good checkpoint was set aside'


def _waits(folder: Path) -> str:
    """Why the trainer waits, as status shows it."""
    (run,) = Journal(folder / 'checkpoints' / 'ledger.journal').history().runs
    why = run.trainers['aa'].why
    return why if why.startswith('waits for a file system') else ''


def test_trouble_that_lasts_ends_a_trainer_with_its_sentence() -> None:
    controller = Controller(DpAllocator(), ControllerSettings(retries=0, stalls=2))
    controller.handle(ev.TrainerSubmitted(0.0, Trainer('aa', 1, 1, 1000)))
    controller.handle(ev.BlockOpened(0.0, 'b', BlockRequest(1)))
    at, number = 1.0, 0
    ended: list[ev.EndTrainer] = []
    events: list[ev.Event] = [ev.NodesJoined(at, 'b', ('n',))]
    while not ended:
        actions = [action for event in events for action in controller.handle(event).actions]
        ended = [action for action in actions if isinstance(action, ev.EndTrainer)]
        starts = [action for action in actions if isinstance(action, ev.StartFragment)]
        at += 1.0
        events = [ev.Tick(at)]
        if starts:
            number += 1
            trouble = ev.FragmentEnded(
                at, 'aa', number, 0, ev.Ending.PREEMPTED, 'the disk is full', storage=True
            )
            events = [trouble]
    assert STORAGE_S <= at < STORAGE_S + 100
    assert number < 25, 'it pauses longer each time'
    assert ended[0].why.startswith('the disk is full; this has lasted for 6')


def test_what_libraries_say_of_a_file_system() -> None:
    for trouble in (
        OSError(errno.ENOSPC, 'No space left on device'),
        RuntimeError('PytorchStreamWriter failed: No space left on device'),
        OSError('Caught OSError in worker 0.\n[Errno 5] Input/output error'),
    ):
        assert storage_trouble(trouble)
    for own in (FileNotFoundError(errno.ENOENT, 'x'), ValueError('Input/output error'), OSError()):
        assert not storage_trouble(own)
