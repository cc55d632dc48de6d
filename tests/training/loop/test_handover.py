"""From one fragment to the next: ranks that run ahead, and the state that stays in memory."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, FreeTrainError, Shape, load_weights
from parsl_freetrain.core.model.events import FragmentProgressed, FragmentStarted
from parsl_freetrain.training.checkpoint import fault_hooks
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory, image_of
from parsl_freetrain.training.process.channel import Channel, address_of
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.standby_slots import (
    ALONE_S,
    FORK_SERVER_VARIABLE,
    StandbyRank,
    StandbySlots,
    key_of,
)
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fork_messages import Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, Handover, RankPlace
from tests.support.damage import flip
from tests.support.examples import equal
from tests.support.ranks import Ranks, all_finish, channel_pair, order, ranks
from tests.support.waiting import LIMIT_S, wait_until
from tests.training.loop.test_shapes import BATCH, LAYERS, Net, Points

TOTAL = 400
Weights = dict[str, torch.Tensor]


def train(ctx: FragmentContext, at_prepare: str = '', endless: int = 0) -> None:
    """Fragment ``endless`` trains on until it is stopped."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if at_prepare:
        Path(at_prepare).with_suffix(f'.{os.getpid()}').touch()
    schedule = ctx.samples_lr(optimizer, lambda samples: 1.0 / (1 + samples / 100))
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
        optimizer.zero_grad()
        ((model(features) - target) ** 2).mean().backward()
        optimizer.step()
        schedule.step()
        if ctx.fragment == endless:
            time.sleep(0.1)


def final(folder: Path) -> Weights:
    latest = PosixCheckpointStore(folder / 'store', 'digits').latest()
    assert latest is not None
    assert latest.samples == TOTAL
    return load_weights(latest)


@contextmanager
def running_ahead(
    fork_server: ForkClient,
    ordered: FragmentOrder,
    count: int,
    folder: Path,
    wait_s: float = 60.0,
    function: Callable[..., None] = train,
    **options: Any,
) -> Iterator[list[Channel[msg.FromRank]]]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    payload = cloudpickle.dumps((function, (), options))
    folder.mkdir(parents=True, exist_ok=True)
    asked = [
        fork_server.start_standby(ordered, i, payload, {}, str(folder / f'ahead-{i}.log'), wait_s)
        for i in range(count)
    ]
    try:
        yield asked
    finally:
        for channel in asked:
            channel.close()


def stopped(
    gang: Ranks, heir: int = 0, goes: int | None = None, *, followed: bool = False
) -> list[Any]:
    """Train a while, and stop for the next one; the outcomes. The ranks from ``heir`` on are told
    that they stay; or else rank ``goes`` that it goes, and the others nothing.
    """
    gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
    for rank in gang.ranks[heir:] if goes is None else ():
        rank.process.send(msg.NodeStays())
    for i, rank in enumerate(gang.ranks):
        rank.process.send(msg.StopTraining('test', node_leaves=i == goes, followed=followed))
    outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'stopped'}
    assert outcomes[0].samples > 0
    return outcomes


def left_uncommitted(gang: Ranks, heir: int = 0) -> Handover:
    """As :func:`stopped`, of a large state that the next fragment is to commit."""
    outcomes = stopped(gang, heir, followed=True)
    sent = outcomes[0].left
    assert sent, gang.ranks[0].log.read_text()
    assert outcomes[0].path is None
    assert (sent.samples, sent.here) == (outcomes[0].samples, heir == 0)
    kept = msg.StateLeft(sent.digest, sent.samples, here=True)
    assert [i for i, outcome in enumerate(outcomes) if outcome.left == kept] == [heir]
    assert all(outcome.left is None for i, outcome in enumerate(outcomes) if i not in (0, heir))
    return Handover(((sent.digest,),), sent.samples, outcomes[0].metrics)


def spoil(path: str) -> None:
    """Whoever reads the tensors of this checkpoint from the disk notices."""
    flip(Path(path, 'rank-0.safetensors'))


def read_nothing(gang: Ranks) -> bool:
    return all(', and 0 were read' in rank.log.read_text() for rank in gang.ranks)


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp('undisturbed')
    all_finish(fork_server, order(folder, total_samples=TOTAL), 1, folder, train)
    return final(folder)


@pytest.mark.parametrize(('before', 'after'), [(1, 3), (3, 1)])
def test_ranks_that_ran_ahead_go_on_with_the_state_in_memory(
    fork_server: ForkClient, tmp_path: Path, undisturbed: Weights, before: int, after: int
) -> None:
    mark = str(tmp_path / 'prepared')
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, before, tmp_path, train, at_prepare=mark, endless=1) as gang:
        with running_ahead(
            fork_server, ordered, after, tmp_path, at_prepare=mark, endless=1
        ) as asked:
            assert all(c.poll(LIMIT_S) and c.recv() == msg.Waiting() for c in asked)
        last = stopped(gang)[0]
        first = {rank.process.pid for rank in gang.ranks}
    waiting = {int(path.suffix[1:]) for path in tmp_path.glob('prepared.*')} - first
    assert len(waiting) == after
    spoil(last.path)
    following = replace(ordered, fragment=2)
    with ranks(
        fork_server, following, after, tmp_path / 'logs', train, at_prepare=mark, endless=1
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert {rank.process.pid for rank in gang.ranks} == waiting
        assert gang.ranks[0].said(FragmentStarted)[0].samples == last.samples
        assert read_nothing(gang)
    assert equal(final(tmp_path), undisturbed)
    assert not list(tmp_path.glob('ahead-*.log'))


@pytest.mark.parametrize(
    'victim', ['gone', pytest.param('short', marks=pytest.mark.long), 'spoilt']
)
def test_without_the_right_state_in_memory_the_checkpoint_is_used(
    fork_server: ForkClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    victim: str,
    undisturbed: Weights,
) -> None:
    ordered, count = order(tmp_path, total_samples=TOTAL), 2 if victim == 'gone' else 1
    with ranks(fork_server, ordered, count, tmp_path, train, endless=1) as gang:
        last = stopped(gang)[0]
    monkeypatch.setenv(FORK_SERVER_VARIABLE, address_of(fork_server.name)[1:].decode())
    files = Contents.read(Path(last.path)).files
    memory = NodeMemory(ordered.trainer, files)
    (file,) = files
    assert memory.has(file)
    if victim == 'gone':
        memory.forget()
    else:
        image = image_of(bytes(files[file][0] // 2 if victim == 'short' else files[file][0]))
        image._blocks = files[file][1]  # which it has not
        assert memory.put(file, image)
        os.close(image.fd or 0)
    with ranks(fork_server, replace(ordered, fragment=3), count, tmp_path / 'logs', train) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(FragmentStarted)[0].samples == last.samples
        assert not read_nothing(gang)
    assert equal(final(tmp_path), undisturbed)


@pytest.mark.parametrize('goes', [None, 0])
def test_the_state_comes_from_a_node_that_stays_where_that_of_rank_0_goes(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    undisturbed: Weights,
    goes: int | None,
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(
        [fork_server, neighbour, fork_server], ordered, 3, tmp_path, train, endless=1
    ) as gang:
        last = stopped(gang, heir=1, goes=goes)[0]
    spoil(last.path)
    with ranks([neighbour], replace(ordered, fragment=2), 2, tmp_path, train) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(FragmentStarted)[0].samples == last.samples
        assert read_nothing(gang)
    assert equal(final(tmp_path), undisturbed)


def large(ctx: FragmentContext, fault: str = '', endless: int = 1) -> None:
    """As if the state were a large one; the second fragment has a fault when it commits it."""
    from parsl_freetrain.training.loop import checkpointer

    def strike(stage: str) -> None:
        if fault == 'no room on the disk':
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == stage:
            os.kill(os.getpid(), 9)

    vars(checkpointer)['LARGE_BYTES'] = 0
    if ctx.fragment == 2:
        fault_hooks.on_saving.append(strike)
    train(ctx, endless=endless)


@pytest.mark.parametrize(
    ('fault', 'ends'),
    [
        ('', {'finished'}),
        ('before-commit', {None, 'peer-lost'}),
        ('no room on the disk', {'storage', 'peer-lost'}),
        pytest.param('the node', set(), marks=pytest.mark.long),
    ],
)
def test_a_large_state_is_committed_by_the_next_fragment_whatever_happens_to_that(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    undisturbed: Weights,
    fault: str,
    ends: set[str | None],
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    store = PosixCheckpointStore(tmp_path / 'store', 'digits')
    with ranks([fork_server, neighbour], ordered, 2, tmp_path, large, fault) as gang:
        left = left_uncommitted(gang, heir=1)
    assert store.latest() is None
    again: Handover | None = left
    if ends:
        following = replace(ordered, fragment=2, handover=left)
        with ranks([neighbour, fork_server], following, 2, tmp_path, large, fault) as gang:
            assert {outcome.how for outcome in gang.run()} == ends
            assert gang.ranks[0].said(FragmentStarted)[0].samples == left.samples
        if 'storage' in ends:
            assert 'cannot be written' in gang.ranks[0].outcome.error.message
            again = None  # what the executor does after an error
    else:
        again = None  # the state is lost with its node, or with the executor, which knew of it
    if fault:
        following = replace(ordered, fragment=3, handover=again)
        with ranks([neighbour, fork_server], following, 2, tmp_path, large) as gang:
            assert {outcome.how for outcome in gang.run()} == {'finished'}
            assert gang.ranks[0].said(FragmentStarted)[0].samples == (left.samples if again else 0)
    assert equal(final(tmp_path), undisturbed)


def test_one_state_at_most_is_uncommitted(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, 1, tmp_path, large) as gang:
        left = left_uncommitted(gang)
    following = replace(ordered, fragment=2, handover=left)
    with ranks(fork_server, following, 1, tmp_path, large, endless=2) as gang:
        assert stopped(gang, followed=True)[0].samples > left.samples
    latest = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
    assert latest is not None and latest.samples >= left.samples


def sabotaged(ctx: FragmentContext, fault: str) -> None:
    import resource

    from parsl_freetrain.training.checkpoint import transport_peers
    from parsl_freetrain.training.loop import checkpointer

    def dies(what: object) -> None:
        if what == 'leaving' or isinstance(what, int):
            os.kill(os.getpid(), 9)

    vars(checkpointer)['LARGE_BYTES'] = 0
    match fault, ctx.rank:
        case 'the heir has no memory', 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # of its files in memory, too
        case 'the heir dies', 1:
            vars(transport_peers)['memory_file'] = dies
        case 'rank 0 dies', 0:
            fault_hooks.on_saving.append(dies)
    train(ctx, endless=1)


@pytest.mark.parametrize(
    ('fault', 'ends', 'who', 'says'),
    [
        ('the heir has no memory', ['stopped', 'stopped'], 1, 'There is no memory for a state of'),
        ('the heir dies', ['stopped', None], 0, 'The state could not be left in memory'),
        ('rank 0 dies', [None, 'peer-lost'], 1, 'PeerLost'),
    ],
)
def test_what_goes_wrong_on_the_way_to_another_node_costs_no_checkpoint(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    fault: str,
    ends: list[str | None],
    who: int,
    says: str,
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks([fork_server, neighbour], ordered, 2, tmp_path, sabotaged, fault) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
        gang.ranks[1].process.send(msg.NodeStays())
        for rank in gang.ranks:
            rank.process.send(msg.StopTraining('test', followed=True))
        outcomes = gang.run()
        assert [outcome.how for outcome in outcomes] == ends
        assert says in gang.ranks[who].log.read_text()
    # A survivor leaves what it holds.
    assert [bool(one.left) for one in outcomes] == [False, ends[1] == 'peer-lost']
    if ends[0] is not None:
        latest = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
        assert latest is not None
        assert (latest.path, latest.samples) == (outcomes[0].path, outcomes[0].samples)
        assert latest.samples > 0


def keeps_what_it_got(ctx: FragmentContext, got: str) -> None:
    """Trains in any shape; what it begins its second fragment with goes into a file."""
    model = Net(ctx, 0.0)
    wrapped, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    torch.save([model.state_dict(), optimizer.state_dict()], f'{got}-{ctx.fragment}-{ctx.rank}')
    for x, y in ctx.loop(Points(), BATCH):
        optimizer.zero_grad()
        wrapped(x, y).backward()
        optimizer.step()
        ctx.report(batches=1)
        if ctx.fragment == 1:
            time.sleep(0.02)


@pytest.mark.parametrize(
    'before',
    [Shape(spatial=(1, 1, 2)), pytest.param(Shape(pipeline=2), marks=pytest.mark.long)],
    ids=str,
)
def test_another_shape_goes_on_with_the_state_in_memory(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, before: Shape
) -> None:
    """From where rank 1 was; of a pipeline it has half."""
    ordered = order(tmp_path, total_samples=50 * BATCH, mode='throughput', shape=before)
    got = str(tmp_path / 'got')
    cloudpickle.register_pickle_by_value(sys.modules[Net.__module__])
    with ranks([fork_server, neighbour], ordered, 2, tmp_path, keeps_what_it_got, got) as gang:
        last = stopped(gang, heir=1)[0]
    committed = read_state(last.path)
    spoil(last.path)
    following = replace(ordered, fragment=2, shape=Shape(data=2))
    with ranks([neighbour], following, 2, tmp_path, keeps_what_it_got, got) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert read_nothing(gang)
    for rank in range(2):
        model, optimizer = torch.load(f'{got}-2-{rank}', weights_only=True)
        assert equal(model, committed.models[0])
        moments = [state['exp_avg'] for state in optimizer['state'].values()]
        kept = committed.optimizers[0]['state']
        assert all(
            torch.equal(moment, kept[f'1.{name}']['exp_avg'])
            for name, moment in zip(model, moments, strict=True)
        )
        assert len(moments) == len(kept) == 2 * LAYERS


def test_a_rank_that_nobody_wants_ends(fork_server: ForkClient, tmp_path: Path) -> None:
    mark = str(tmp_path / 'prepared')
    with running_ahead(fork_server, order(tmp_path), 1, tmp_path, wait_s=0.2, at_prepare=mark) as (
        asked,
    ):
        assert asked.poll(LIMIT_S)
        pid = int(next(tmp_path.glob('prepared.*')).suffix[1:])
        wait_until(lambda: not Path(f'/proc/{pid}').exists())
        assert not (tmp_path / 'ahead-0.log').exists()


def test_only_the_last_rank_ahead_is_taken_over(fork_server: ForkClient, tmp_path: Path) -> None:
    given: dict[str, Any] = {'at_prepare': str(tmp_path / 'prepared')}
    ordered, ahead = order(tmp_path, total_samples=128), list[int]()
    for _ in range(2):
        with running_ahead(fork_server, ordered, 1, tmp_path, **given) as (asked,):
            assert asked.poll(LIMIT_S)
            pids = {int(path.suffix[1:]) for path in tmp_path.glob('prepared.*')}
            ahead.extend(pids - {*ahead})
            wait_until(lambda: not ahead[1:] or not Path(f'/proc/{ahead[0]}').exists())
    other = order(tmp_path, seed=8, total_samples=128)
    with ranks(fork_server, other, 1, tmp_path, train, **given) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
        assert gang.ranks[0].process.pid not in ahead
    with ranks(fork_server, replace(ordered, fragment=2), 1, tmp_path, train, **given) as gang:
        (outcome,) = gang.run()
        assert gang.ranks[0].process.pid == ahead[1]
        assert 'the seed has changed from 8 to 7' in outcome.error.message


def reads_first(ctx: FragmentContext, where: str, data: bytes) -> None:
    """As one that reads a long time: until there is a file ``go``."""
    (Path(where) / f'reads.{os.getpid()}').touch()
    while not (Path(where) / 'go').exists():
        time.sleep(0.01)
    raise LookupError(f'fragment {ctx.fragment}')


def test_a_rank_that_still_runs_ahead_is_taken(fork_server: ForkClient, tmp_path: Path) -> None:
    # More than a socket holds for somebody who does not read.
    given: dict[str, Any] = {'where': str(tmp_path), 'data': bytes(5_000_000)}
    ordered = order(tmp_path)
    with running_ahead(fork_server, ordered, 1, tmp_path, function=reads_first, **given):
        wait_until(lambda: list(tmp_path.glob('reads.*')))
    (reads,) = tmp_path.glob('reads.*')
    following = replace(ordered, fragment=2)
    with ranks(fork_server, following, 1, tmp_path, reads_first, **given) as gang:
        assert gang.ranks[0].process.pid == int(reads.suffix[1:])
        assert gang.ranks[0].log.exists()
        (tmp_path / 'go').touch()
        (outcome,) = gang.run()
    assert (outcome.how, outcome.error.message) == ('error', 'fragment 2')


def test_ranks_that_run_ahead_for_others_make_way(fork_server: ForkClient, tmp_path: Path) -> None:
    mark = str(tmp_path / 'prepared')
    with running_ahead(fork_server, order(tmp_path), 1, tmp_path, at_prepare=mark) as (asked,):
        assert asked.poll(LIMIT_S)
    pid = int(next(tmp_path.glob('prepared.*')).suffix[1:])
    other = order(tmp_path / 'other', trainer='other')
    with ranks(fork_server, other, 1, tmp_path / 'other', reads_first, str(tmp_path), b''):
        wait_until(lambda: not Path(f'/proc/{pid}').exists())
        # One that comes too late does not stay either.
        with (
            pytest.raises(FreeTrainError, match='could not start a rank'),
            running_ahead(fork_server, order(tmp_path), 1, tmp_path),
        ):
            pass


@pytest.fixture
def sleepers() -> Iterator[Callable[[], StandbyRank]]:
    """Makes ranks that run ahead, all for the same."""
    processes: list[subprocess.Popen[bytes]] = []
    channels: list[Channel[Any]] = []

    def sleeper() -> StandbyRank:
        processes.append(process := subprocess.Popen(['sleep', '600']))
        channels.extend(pair := channel_pair())
        return StandbyRank(
            key_of(launch()), 'digits', process.pid, os.pidfd_open(process.pid), pair[0], ''
        )

    try:
        yield sleeper
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for channel in channels:
            channel.close()


def launch() -> Launch:
    return Launch(order(Path('/')), RankPlace(0, 1, 0, 1, ''), {}, '')


def test_a_rank_that_is_wanted_and_lives_is_given(sleepers: Callable[[], StandbyRank]) -> None:
    slots, (ours, theirs) = StandbySlots(), channel_pair()
    first, second, third = (sleepers() for _ in range(3))
    with closing(ours), closing(theirs):
        slots.add(first)
        slots.add(second)  # so the first one has been killed; it has not been reaped
        assert slots.claim(launch(), ours) == second
        assert theirs.recv() == msg.RankPid(second.pid, has_payload=True)
        assert slots.claim(launch(), ours) is None
        slots.add(third)
        os.kill(third.pid, 9)
        assert os.waitid(os.P_PID, third.pid, os.WEXITED | os.WNOWAIT)
        assert slots.claim(launch(), ours) is None
    for rank in (first, second, third):
        os.close(rank.pidfd)


def test_ranks_ahead_end_after_their_trainer_has_left(sleepers: Callable[[], StandbyRank]) -> None:
    slots, (ours, theirs) = StandbySlots(), channel_pair()
    with closing(ours), closing(theirs):
        slots.add(rank := sleepers())
        for now, trainers in (
            (0.0, {'digits'}),
            (500.0, {'other'}),
            (500.0 + ALONE_S, set[str]()),
            (501.0 + ALONE_S, {'digits'}),  # it came back
            (900.0 + ALONE_S, {'other'}),
        ):
            slots.dismiss_forsaken(trainers, now)
        slots.dismiss_forsaken((), 901.0 + 2 * ALONE_S)
        assert slots.claim(launch(), ours) is None
        assert os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    os.close(rank.pidfd)


def locks(ctx: FragmentContext, where: str, **options: Any) -> None:
    """Only one rank at a time may come as far as ``ctx.prepare``."""
    import fcntl

    lock = (Path(where) / 'lock').open('w')
    with (Path(where) / 'tried').open('a') as tried:
        tried.write(f'{os.getpid()}\n')
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    train(ctx, **options)


def test_a_rank_ahead_that_fails_ends_and_the_fragment_starts_plainly(
    fork_server: ForkClient, tmp_path: Path, undisturbed: Weights
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    given: dict[str, Any] = {'where': str(tmp_path), 'endless': 1}
    with ranks(fork_server, ordered, 1, tmp_path, locks, **given) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
        with running_ahead(fork_server, ordered, 1, tmp_path, function=locks, **given) as (asked,):
            assert asked.poll(LIMIT_S)
            with pytest.raises(EOFError):  # it has ended, and does not wait
                asked.recv()
        first, ahead = (tmp_path / 'tried').read_text().split()
        wait_until(lambda: not Path(f'/proc/{ahead}').exists())
        stopped(gang)
    following = replace(ordered, fragment=2)
    with ranks(fork_server, following, 1, tmp_path, locks, **given) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
        assert gang.ranks[0].process.pid not in (int(first), int(ahead))
    assert equal(final(tmp_path), undisturbed)
