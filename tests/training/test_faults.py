"""The faults strike where they say, once, and nowhere else. A file system in trouble for some
seconds ends no training and costs no retry.
"""

import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parsl_freetrain import FragmentContext
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.trainer_end import STORAGE_S
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Trainer
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.testing import disk_full_at, fail_at, kill_at, preempt_at, with_faults
from parsl_freetrain.training.checkpoint.directories import directories
from parsl_freetrain.training.checkpoint.manifest import is_committed
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.comm.device_faults import storage_trouble
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Outcome
from tests.support import file_system_shim as fs
from tests.support.faults import disconnect_at, kill_between
from tests.support.programs import Program
from tests.support.ranks import KILLED, Ranks, order, ranks
from tests.support.waiting import LIMIT_S, wait_until
from tests.training.loop.test_fragments import BATCH, SIZE, Images, network, train

TOTAL = 3 * SIZE
STEP = 4


def store(folder: Path) -> PosixCheckpointStore:
    return PosixCheckpointStore(folder / 'store', 'digits')


def run(
    fork_server: ForkClient, folder: Path, *faults: Any, world_size: int = 2, fragment: int = 1
) -> Ranks:
    ordered = order(folder, fragment, total_samples=TOTAL, checkpoint_every_s=1e-9)
    with ranks(fork_server, ordered, world_size, folder, with_faults(train, *faults)) as gang:
        gang.run()
        return gang


def hows(gang: Ranks) -> list[str | None]:
    return [outcome.how for rank in gang.ranks for outcome in rank.said(Outcome) or [KILLED]]


def test_it_fails_at_that_step_of_that_rank_alone(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path, fail_at(1, STEP))
    assert hows(gang) == ['peer-lost', 'error']
    assert gang.ranks[1].outcome.error.type == 'InjectedFault'
    assert gang.ranks[1].outcome.samples >= STEP * BATCH - BATCH
    gang = run(fork_server, tmp_path, fail_at(1, STEP), fragment=2)
    assert hows(gang) == ['finished'] * 2


def test_it_counts_the_steps_of_a_data_loader(fork_server: ForkClient, tmp_path: Path) -> None:
    def with_loader(ctx: FragmentContext) -> None:
        torch.manual_seed(0)
        model = network()
        loader = torch.utils.data.DataLoader(Images(), BATCH)
        model, optimizer, loader = ctx.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), loader
        )
        for _ in ctx.epochs():
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()

    ordered = order(tmp_path, 1, total_samples=TOTAL, checkpoint_every_s=1e-9)
    faulty = with_faults(with_loader, fail_at(0, STEP))
    with ranks(fork_server, ordered, 1, tmp_path, faulty) as gang:
        gang.run()
        assert gang.ranks[0].outcome.error.type == 'InjectedFault'
        assert STEP * BATCH <= gang.ranks[0].outcome.samples < (STEP + 1) * BATCH


def test_it_kills_and_disconnects(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path / 'kill', kill_at(0, STEP))
    assert gang.ranks[0].status == -signal.SIGKILL
    assert hows(gang) == [None, 'peer-lost']
    gang = run(fork_server, tmp_path / 'cut', disconnect_at(1, STEP))
    assert gang.ranks[0].outcome.how == 'peer-lost'
    assert all(rank.status != 0 for rank in gang.ranks)


def test_a_preemption_with_a_grace_saves(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=10_000_000)
    told = with_faults(train, preempt_at(0.5, grace_s=30.0))
    with ranks(fork_server, ordered, 2, tmp_path, told) as gang:
        gang.run()
    assert hows(gang) == ['stopped'] * 2
    ordered = order(tmp_path / 'now', total_samples=10_000_000)
    with ranks(fork_server, ordered, 1, tmp_path, with_faults(train, preempt_at(0.5))) as gang:
        gang.run()
    assert gang.ranks[0].status == -signal.SIGKILL


@pytest.mark.parametrize('after', ['begin', 'before-commit'])
def test_it_kills_before_committing(fork_server: ForkClient, tmp_path: Path, after: str) -> None:
    fault = kill_between(after, 'committed', checkpoint=2)
    gang = run(fork_server, tmp_path, fault, world_size=1)
    assert gang.ranks[0].status == -signal.SIGKILL
    left = directories(tmp_path / 'store')
    assert [is_committed(path) for path in left] == [True, False]
    assert hows(run(fork_server, tmp_path, world_size=1, fragment=2)) == ['finished']


def test_a_full_disk_costs_only_what_was_not_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path, disk_full_at(1000, checkpoint=2), world_size=1)
    error = gang.ranks[0].outcome.error
    assert 'cannot be written' in error.message
    latest = store(tmp_path).latest()
    assert latest is not None
    assert len(directories(tmp_path / 'store')) == 1  # nothing half-written takes up the room
    assert hows(run(fork_server, tmp_path, world_size=1, fragment=2)) == ['finished']


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


@pytest.mark.long
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
