"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import TensorDataset

from parsl_freetrain import Checkpoint, FragmentContext, FreeTrainError, Retention
from parsl_freetrain.core.model.events import CheckpointSaved
from parsl_freetrain.training.checkpoint import fault_hooks, transport_memory
from parsl_freetrain.training.checkpoint.block_digests import digest_of_blocks
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.manifest import read_manifest
from parsl_freetrain.training.checkpoint.part_writers import PartWriters
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of
from parsl_freetrain.training.checkpoint.store import Fenced, PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.checkpoint.transport_memory import Snapshots
from parsl_freetrain.training.comm.peers import SealedStore
from parsl_freetrain.training.loop import checkpointer
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import FromRank, SavingCheckpoint, ToRank
from parsl_freetrain.training.steps.reduction_tree import SharedRows
from tests.support.ranks import Channels, channel_pair, ended, order, ranks
from tests.support.waiting import LIMIT_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which a test sets."""
    now = [1e6]
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    return now


class Gate:
    """A store's hook that holds a save at a step until it is opened."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, step: str) -> None:
        if step == self.step:
            self.reached.set()
            assert self.open.wait(LIMIT_S)


@pytest.fixture
def channels() -> Iterator[Channels]:
    """Both ends of a rank's channel."""
    ours, theirs = channel_pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def saved(channel: Channel[FromRank]) -> Checkpoint:
    while not isinstance(message := channel.recv(), CheckpointSaved):
        assert isinstance(message, SavingCheckpoint)
    return message.checkpoint


def things() -> Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    return sort_out((model, optimizer))


def state_of(prepared: Prepared, samples: int = 10) -> Callable[[], State]:
    return lambda: collect(content_of(prepared), Position(samples, 100, 0, 50, 10, 0))


def keeper(
    folder: Path,
    channel: Channel[ToRank],
    hook: Callable[[str], None] | None = None,
    sender: Any = None,
    **changes: Any,
) -> Checkpointer:
    changes.setdefault('checkpoint_every_s', 1e-9)
    ordered = order(folder, **changes)
    store = PosixCheckpointStore(Path(ordered.store), ordered.trainer, hook=hook)
    return Checkpointer(store, ordered, channel, None, sender)


def files(path: str) -> dict[str, str]:
    return {file.name: digest_of_blocks(file.blocks) for file in read_manifest(Path(path)).files}


def test_a_device_copies_while_python_goes_on_and_before_what_follows(
    tmp_path: Path, channels: Channels, monkeypatch: Any
) -> None:
    """Without a device: a stream on which copies take long."""
    order_of_events, copied = [], threading.Event()

    class Stream:
        def record_event(self) -> Stream:
            order_of_events.append('the copies are given to the stream of the next pass')
            return self

        def synchronize(self) -> None:
            assert copied.wait(LIMIT_S)
            order_of_events.append('copied')

    monkeypatch.setattr(torch.accelerator, 'current_stream', lambda device: Stream())
    monkeypatch.setattr(transport_memory, '_devices', lambda state: {torch.device('cuda')})
    beside = keeper(tmp_path, channels[0], order_of_events.append)
    beside.save_beside(state_of(things()), 10, {})
    order_of_events.append('the next pass')
    copied.set()
    assert beside.settled() is not None
    assert order_of_events[1:4] == ['the next pass', 'copied', 'begin']


@pytest.mark.parametrize('refuses', [False, True])
def test_memory_that_cannot_be_page_locked_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Without a device: of a refusal CUDA tells the next launch of the thread that asked."""
    kept, locked = threading.local(), set[int]()

    def register(address: int, size: int, flags: int) -> int:
        if refuses or not size:
            kept.refused = True
            return 1
        locked.add(address)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.remove)
    monkeypatch.setattr(torch.cuda, 'cudart', lambda: cudart)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(transport_memory, '_devices', lambda state: {torch.device('cuda')})
    snapshots = Snapshots()
    for size in (3, 5, 4):
        snapshots.reserve(State({'one': torch.ones(1000 * size)}, {}))
        assert len(locked) == (not refuses)
    locked.clear()
    rows = SharedRows([torch.empty(size) for size in (0, 3)], torch.device('cuda', 0))
    assert len(locked) == (not refuses)
    del rows
    assert not locked
    assert not hasattr(kept, 'refused')


def test_training_goes_on_and_checkpoint_holds_what_was(tmp_path: Path, channels: Channels) -> None:
    gate, prepared = Gate('begin'), things()
    at_once = keeper(tmp_path / 'at once', channels[0])
    at_once.save_now(state_of(prepared), 10, {'loss': 1.0})
    saved(channels[1])
    later = keeper(tmp_path / 'later', channels[0], gate)
    assert later.wants_to_save()
    later.save_beside(state_of(prepared), 10, {'loss': 1.0})
    assert gate.reached.wait(LIMIT_S)
    assert later.last is None
    assert not later.wants_to_save()  # one at a time
    with torch.no_grad():
        for tensor in prepared.tensors():
            tensor.fill_(7.0)  # training goes on
    gate.open.set()
    found = later.settled()
    assert found is not None and at_once.last is not None
    assert files(found.path) == files(at_once.last.path)
    assert (found.samples, found.metrics) == (10, {'loss': 1.0})
    assert not (read_state(found.path).models[0]['0.weight'] == 7.0).any()
    message = saved(channels[1])
    assert (message.path, message.samples) == (found.path, 10)
    assert message.pause_s > 0 and message.seconds > 0
    assert later.wants_to_save()


def test_a_checkpoint_is_wanted_just_before_the_nodes_may_be_preempted(
    tmp_path: Path, channels: Channels, clock: list[float]
) -> None:
    begun = clock[0]
    for ends_in_s, saves in ((None, False), (-1.0, False), (0.1, True), (99.0, False)):
        clock[0] = begun
        until = None if ends_in_s is None else begun + 60.0 + ends_in_s
        kept = keeper(tmp_path, channels[0], checkpoint_every_s=3600.0, exempt_until=until)
        clock[0] += 60.0
        assert kept.wants_to_save() is saves, ends_in_s


def test_checkpoints_are_as_frequent_as_interruptions_ask_for(
    tmp_path: Path, channels: Channels, clock: list[float]
) -> None:
    rows = (None, 2.0, 30.0), (0.04, 2.0, 10.0), (100.0, 2.0, 4.0), (100.0, 0.2, 1.0)
    for per_s, checkpoint_s, after_s in rows:
        kept = keeper(tmp_path, channels[0], checkpoint_every_s=30.0, interruptions_per_s=per_s)
        kept.timing.expect(0, checkpoint_s)
        clock[0] += after_s - 0.01
        assert not kept.wants_to_save()
        clock[0] += 0.02
        assert kept.wants_to_save()


def test_what_counts_is_how_long_checkpoints_hold_training_up(
    tmp_path: Path, channels: Channels, clock: list[float]
) -> None:
    begun = clock[0]

    def slowly() -> State:
        clock[0] += 0.5
        return state_of(things())()

    kept = keeper(tmp_path, channels[0], checkpoint_every_s=30.0, interruptions_per_s=0.04)
    kept.timing.expect(0, 2.0)  # a checkpoint every 10 s
    kept.save_beside(slowly, 10, {})
    assert kept.settled() is not None
    clock[0] = begun + 5.49
    assert not kept.wants_to_save()
    clock[0] = begun + 5.51
    assert kept.wants_to_save()


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, channels: Channels) -> None:
    gate, prepared = Gate('written'), things()
    kept = keeper(tmp_path, channels[0], gate, keep=Retention(2))
    kept.save_beside(state_of(prepared), 10, {})
    assert gate.reached.wait(LIMIT_S)
    threading.Timer(0.2, gate.open.set).start()
    kept.save_now(state_of(prepared, 20), 20, {})
    assert [saved(channels[1]).samples for _ in range(2)] == [10, 20]
    store = PosixCheckpointStore(tmp_path / 'store', 'digits')
    assert [checkpoint.samples for checkpoint in store.checkpoints()] == [10, 20]


def test_stop_allows_for_the_one_that_is_being_written(tmp_path: Path, channels: Channels) -> None:
    gate, prepared = Gate('begin'), things()
    kept = keeper(tmp_path, channels[0], gate, deadline=time.monotonic() + 250.0)
    kept.timing.expect(0, 100.0)  # two times that and a bit are left
    assert not kept.must_stop(1)
    kept.save_beside(state_of(prepared), 10, {})
    assert gate.reached.wait(LIMIT_S)
    assert kept.must_stop(1)
    gate.open.set()
    kept.settled()
    assert not kept.must_stop(1)


def test_what_goes_wrong_is_raised_at_the_next_step(tmp_path: Path, channels: Channels) -> None:
    prepared = things()
    kept = keeper(tmp_path, channels[0], fragment=2)
    PosixCheckpointStore(tmp_path / 'store', 'digits').fence(3)
    kept.save_beside(state_of(prepared), 10, {})
    with pytest.raises(Fenced, match='fragment 3 has begun'):
        while not kept.wants_to_save():
            time.sleep(0.001)

    def full(step: str) -> None:
        if step == 'begin':
            raise OSError(28, 'No space left on device')

    kept = keeper(tmp_path / 'full', channels[0], full)
    kept.save_beside(state_of(prepared), 10, {})
    said = r"of trainer 'digits' at 10 samples cannot be written to .*full/store \(No space left"
    with pytest.raises(FreeTrainError, match=said):
        kept.save_beside(state_of(prepared), 20, {})
    kept.save_beside(state_of(prepared), 20, {})
    assert kept.settled() is None


def test_a_snapshot_is_one_piece_of_memory_the_file_that_is_written(tmp_path: Path) -> None:
    tensors = {
        'number': torch.tensor(7),
        'none': torch.zeros(0, 3, dtype=torch.float64),
        'half': torch.randn(3, 5).to(torch.bfloat16),
        'bits': torch.tensor([True, False, True]),
        'complex': torch.randn(4, dtype=torch.complex128)[::2].conj(),
        'last': torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    snapshots = Snapshots()
    address = snapshots.take(State(tensors, {})).tensors['last'].data_ptr()
    taken = snapshots.take(State(tensors, {}))  # uses the same memory again
    copy = taken.tensors
    assert copy['last'].data_ptr() == address
    assert all(torch.equal(copy[name], tensors[name]) for name in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in copy.values()}) == 1
    taken.part(0, tmp_path)
    State(tensors, {}).part(1, tmp_path)
    file = (tmp_path / 'rank-0.safetensors').read_bytes()
    assert file == (tmp_path / 'rank-1.safetensors').read_bytes()
    assert copy['last'].untyped_storage().nbytes() == len(file)
    assert taken.image is not None
    assert taken.image.fd is not None
    assert os.pread(taken.image.fd, len(file) + 1, 0) == file


def test_at_a_stop_a_state_is_copied_once(
    tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is written, and it is left."""
    copies: list[State] = []
    left: list[State] = []
    take = Snapshots.take

    def taken(snapshots: Snapshots, state: State) -> State:
        copies.append(take(snapshots, state))
        return copies[-1]

    class Leaves:
        left = None
        agree = staticmethod(lambda: None)
        leave = staticmethod(lambda state, samples, uncommitted: left.append(state))

    leaves: Any = Leaves()
    monkeypatch.setattr(Snapshots, 'take', taken)
    keeper(tmp_path, channels[0], sender=leaves).save_and_stop(state_of(things()), 10, {})
    assert len(copies) == 1
    assert left == copies
    read, own = read_state(saved(channels[1]).path).models[0], things().models[0].state_dict()
    assert all(torch.equal(read[name], own[name]) for name in own)


def test_the_first_step_is_no_measure_of_the_others(tmp_path: Path, channels: Channels) -> None:
    """It includes compilation, and the connections of the ranks."""
    kept = keeper(tmp_path, channels[0], deadline=time.monotonic() + 3000.0)
    kept.timing.step_took(10_000.0)
    assert kept.must_stop(1)  # nothing else is known
    assert kept.outcome('stopped', None, 0, {}).step_s == 0.0
    kept.timing.step_took(0.5)
    assert not kept.must_stop(1)
    assert kept.outcome('stopped', None, 0, {}).step_s == 0.5


def test_the_deadline_margin_uses_the_slowest_rank(
    tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """The other rank needs 100 seconds for its part, rank 0 none for its own."""
    shared = HashStore()

    def reached(stage: str) -> None:
        if stage == 'part-begun' and threading.current_thread() is other:
            clock[0] += 100.0

    monkeypatch.setattr(fault_hooks, 'on_saving', [reached])

    whole = state_of(things())()

    def half(rank: int) -> State:
        structure = whole.structure if rank == 0 else None
        return State({'x': torch.ones(2)}, structure, {'x': Box((4,), (2 * rank,), (2,))})

    def writers(rank: int) -> PartWriters:
        store = SealedStore(shared, 'secret')
        return PartWriters(store, rank, 2, tmp_path / 'store', lambda: LIMIT_S)

    ordered = order(tmp_path, deadline=clock[0] + 250.0)
    store = PosixCheckpointStore(Path(ordered.store), ordered.trainer)
    kept = Checkpointer(store, ordered, channels[0], None, writers=writers(0))
    kept.timing.step_took(1.0)
    follower = writers(1)
    other = threading.Thread(target=lambda: follower.follow(follower.begin(), half(1)))
    other.start()
    assert not kept.must_stop(1)
    kept.save_now(lambda: half(0), 10, {})
    other.join()
    assert kept.timing.longest_s == 100.0
    assert kept.must_stop(1)


def fails_while_saving(ctx: FragmentContext) -> None:
    """With a checkpoint that is not written before the error."""
    failed = threading.Event()

    def wait(stage: str) -> None:
        assert failed.wait(LIMIT_S)

    fault_hooks.on_saving.append(wait)
    model = nn.Linear(3, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for (x,) in ctx.loop(TensorDataset(torch.ones(64, 3)), 4):
        if ctx._run.checkpointer._background.busy:
            failed.set()
            raise ValueError('mine')
        model(x).mean().backward()
        optimizer.step()


def test_a_users_error_does_not_end_a_save(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=64, checkpoint_every_s=1e-9)
    (outcome,) = ended(fork_server, ordered, 1, tmp_path, fails_while_saving)
    assert (outcome.how, outcome.error.message) == ('error', 'mine')
    found = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
    assert found is not None and found.path == outcome.path
    assert found.samples == outcome.samples


def test_memory_for_a_large_state_is_made_beside_the_first_steps(
    tmp_path: Path, channels: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    memory = Snapshots._memory

    def counted(snapshots: Snapshots, size: int) -> torch.Tensor:
        made.append(threading.current_thread().name)
        return memory(snapshots, size)

    monkeypatch.setattr(Snapshots, '_memory', counted)
    kept, prepared = keeper(tmp_path, channels[0]), things()
    kept.make_room(state_of(prepared)())
    assert not made  # it is small
    kept.timing.expect(checkpointer.LARGE_BYTES, 0.0)
    kept.make_room(state_of(prepared)())
    kept.save_beside(state_of(prepared), 10, {})
    assert made == ['memory for checkpoints']
    found = kept.settled()
    assert found is not None
    read, own = read_state(found.path).models[0], prepared.models[0].state_dict()
    assert all(torch.equal(read[name], own[name]) for name in own)


def test_near_the_end_a_checkpoint_is_written_if_a_kill_would_cost_more(
    tmp_path: Path, channels: Channels, clock: list[float]
) -> None:
    rows = (0.1, 0.9, False), (0.1, 1.1, True), (5.0, 1.1, False), (5.0, 5.4, True)
    for writing_s, age_s, saves in rows:
        kept = keeper(tmp_path, channels[0], checkpoint_every_s=3600.0)
        kept.timing.expect(0, writing_s)
        clock[0] += age_s
        assert not kept.wants_to_save()
        assert kept.wants_to_save(near_end=True) is saves, (writing_s, age_s)


def test_the_last_checkpoint_does_not_wait_for_one_that_saves_little(
    tmp_path: Path, channels: Channels, clock: list[float]
) -> None:
    """Writing takes 5 s and a step .1 s, and a checkpoint every 2 s was asked for."""
    last = (1, 40.0, False), (1, 50.0, True)
    for steps_left, age_s, saves in (*last, (40, 9.0, False), (40, 11.0, True), (48, 3.0, True)):
        kept = keeper(tmp_path, channels[0], checkpoint_every_s=2.0)
        for _ in range(2):
            kept.timing.step_took(0.1)
        kept.timing.wrote(4.9)
        kept.timing.pause_s = 0.1
        clock[0] += age_s
        assert kept.wants_to_save(steps_left=steps_left) is saves, (steps_left, age_s)


def trains_briefly(ctx: FragmentContext, prepares_s: float, by_epochs: bool) -> None:
    """Take ten steps of 80 ms, after much to prepare, or where a checkpoint would take long."""
    time.sleep(prepares_s / 2)
    dataset, model = TensorDataset(torch.ones(20, 5)), nn.Linear(5, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for _ in ctx.epochs() if by_epochs else [0]:
        for (x,) in ctx.loop(dataset, 4):
            if not ctx.samples:
                time.sleep(prepares_s / 2)
                ctx._run.checkpointer.timing.wrote(0.0 if prepares_s else 500.0)
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            time.sleep(0.08)


@pytest.mark.parametrize(
    ('prepares_s', 'every_s', 'by_epochs'), [(2.0, 1.9, False), (0.0, 0.4, True)]
)
def test_a_short_fragment_saves_once(
    fork_server: ForkClient, tmp_path: Path, prepares_s: float, every_s: float, by_epochs: bool
) -> None:
    """Where the first step, or the last checkpoint's wait, takes longer than the interval."""
    ordered = order(tmp_path, total_epochs=2, checkpoint_every_s=every_s, mode='throughput')
    with ranks(fork_server, ordered, 2, tmp_path, trains_briefly, prepares_s, by_epochs) as gang:
        gang.run()
    assert gang.ranks[0].outcome.how == 'finished', gang.ranks[0].log.read_text()
    assert [said.checkpoint.samples for said in gang.ranks[0].said(CheckpointSaved)] == [40]
