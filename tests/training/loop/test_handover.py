"""From one fragment to the next: ranks that run ahead, and the state that stays in memory."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from msgspec import structs
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import Samples
from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.checkpoint import fault_hooks, memory_image
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.checkpoint.memory_image import digest_of, pack, unpack
from parsl_freetrain.training.checkpoint.state import (
    Position,
    State,
    collect,
    content_of,
    read_state,
)
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import sort_out
from parsl_freetrain.training.comm.peers import Alone
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.handover_receive import fetch, keep, receive
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_address import address_of
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.standby_slots import (
    ALONE_S,
    FORK_SERVER_VARIABLE,
    StandbyRank,
    StandbySlots,
    key_of,
)
from parsl_freetrain.training.spec.fork_messages import Launch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, Handover, RankPlace
from parsl_freetrain.training.spec.messages import (
    FromRank,
    NodeStays,
    Progress,
    RankPid,
    Started,
    StateLeft,
    StopTraining,
    Waiting,
)
from tests.support.ranks import Ranks, channel_pair, order, ranks, running_fork_server
from tests.support.waiting import LIMIT_S
from tests.training.loop.test_shapes import BATCH, LAYERS, Net, Points

TOTAL = 400


def train(
    ctx: FragmentContext,
    at_prepare: str = '',
    kill: tuple[int, int, int] | None = None,
    endless: int = 0,
) -> None:
    """Kills rank ``kill[1]`` of fragment ``kill[0]`` at sample ``kill[2]``; fragment ``endless``
    trains on until it is stopped.
    """
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if at_prepare:
        Path(at_prepare).with_suffix(f'.{os.getpid()}').touch()
    schedule = ctx.samples_lr(optimizer, lambda samples: 1.0 / (1 + samples / 100))
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8):
        if kill is not None and (ctx.fragment, ctx.rank) == kill[:2] and ctx.samples >= kill[2]:
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        ((model(features) - target) ** 2).mean().backward()
        optimizer.step()
        schedule.step()
        ctx.state['batches'] = ctx.state.get('batches', 0) + (ctx.samples % 8 == 0)
        if ctx.fragment == endless:
            time.sleep(0.1)


def final(folder: Path) -> dict[str, torch.Tensor]:
    latest = PosixCheckpointStore(folder / 'store', 'digits').latest()
    assert latest is not None
    assert latest.samples == TOTAL
    return load_weights(latest)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def is_true(what: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


@contextmanager
def running_ahead(
    fork_server: ForkClient,
    ordered: FragmentOrder,
    count: int,
    folder: Path,
    wait_s: float = 60.0,
    function: Callable[..., None] = train,
    **options: Any,
) -> Iterator[list[Channel[FromRank]]]:
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


def stopped_and_left(
    gang: Ranks, heir: int = 0, goes: int | None = None, *, followed: bool = False
) -> Handover:
    """Let a fragment train a while, and stop it for the next one; what it left at rank ``heir``.

    The ranks from there on are told that they stay; or else rank ``goes`` is told that it goes, and
    the others nothing.
    """
    gang.hear(lambda: bool(gang.ranks[0].said(Progress)))
    for rank in gang.ranks[heir:] if goes is None else ():
        rank.process.send(NodeStays())
    for i, rank in enumerate(gang.ranks):
        rank.process.send(StopTraining('test', node_leaves=i == goes, followed=followed))
    outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'stopped'}
    sent = outcomes[0].left
    assert sent, gang.ranks[0].log.read_text()
    assert sent.samples == outcomes[0].samples > 0
    assert sent.here == (heir == 0)
    assert [
        i
        for i, outcome in enumerate(outcomes)
        if outcome.left == StateLeft(sent.digest, sent.samples, here=True)
    ] == [heir]
    assert all(outcome.left is None for i, outcome in enumerate(outcomes) if i not in (0, heir))
    return Handover(sent.digest, outcomes[0].path or '', sent.samples, 1, outcomes[0].metrics)


@pytest.fixture(scope='module')
def neighbour(
    fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkClient]:
    """The fork server of another node."""
    with running_fork_server(tmp_path_factory.mktemp('fork_server'), fork_server.name) as parent:
        yield parent


@pytest.fixture(scope='module')
def undisturbed(
    fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp('undisturbed')
    with ranks(fork_server, order(folder, total_samples=TOTAL), 1, folder, train) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
    return final(folder)


@pytest.mark.parametrize(('before', 'after'), [(1, 3), (3, 1)])
def test_ranks_that_ran_ahead_go_on_with_the_state_in_memory(
    fork_server: ForkClient,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    before: int,
    after: int,
) -> None:
    mark = str(tmp_path / 'prepared')
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, before, tmp_path, train, at_prepare=mark, endless=1) as gang:
        with running_ahead(
            fork_server, ordered, after, tmp_path, at_prepare=mark, endless=1
        ) as asked:
            assert all(channel.poll(LIMIT_S) and channel.recv() == Waiting() for channel in asked)
        left = stopped_and_left(gang)
        first = {rank.process.pid for rank in gang.ranks}
    waiting = {int(path.suffix[1:]) for path in tmp_path.glob('prepared.*')} - first
    assert len(waiting) == after
    shutil.move(left.path, tmp_path / 'elsewhere')  # so it cannot be read
    following = replace(ordered, fragment=2, handover=left)
    with ranks(
        fork_server, following, after, tmp_path / 'logs', train, at_prepare=mark, endless=1
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert {rank.process.pid for rank in gang.ranks} == waiting
        assert gang.ranks[0].said(Started)[0].samples == left.samples
        assert 'as it is in memory' in gang.ranks[-1].log.read_text()
    assert equal(final(tmp_path), undisturbed)
    assert not list(tmp_path.glob('ahead-*.log'))


@pytest.mark.parametrize('victim', ['digest', 'memory'])
def test_without_the_right_state_in_memory_the_checkpoint_is_used(
    fork_server: ForkClient, tmp_path: Path, victim: str, undisturbed: dict[str, torch.Tensor]
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, 2, tmp_path, train, endless=1) as gang:
        left = stopped_and_left(gang)
    if victim == 'memory':  # somebody else had it
        other = replace(
            ordered,
            fragment=2,
            handover=left,
            store=str(tmp_path / 'other'),
            spec=structs.replace(ordered.spec, goal=Samples(left.samples)),
        )
        with ranks(fork_server, other, 1, tmp_path / 'other', train) as gang:
            gang.run()
    wrong = replace(left, digest='0' * 64) if victim == 'digest' else left
    with ranks(
        fork_server, replace(ordered, fragment=3, handover=wrong), 2, tmp_path / 'logs', train
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(Started)[0].samples == left.samples
        assert 'in memory' not in gang.ranks[0].log.read_text()
    assert equal(final(tmp_path), undisturbed)


def test_a_kill_while_the_state_is_handed_over_loses_nothing(
    fork_server: ForkClient, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, 2, tmp_path, train, endless=1) as gang:
        left = stopped_and_left(gang)
    # The fragment that has fetched it dies at its first step; the state has been given away by
    # then.
    with ranks(
        fork_server,
        replace(ordered, fragment=2, handover=left),
        3,
        tmp_path / '2',
        train,
        kill=(2, 0, left.samples),
    ) as gang:
        assert [outcome.how for outcome in gang.run()] == [None, 'peer-lost', 'peer-lost']
    with ranks(fork_server, replace(ordered, fragment=3), 2, tmp_path / '3', train) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(Started)[0].samples == left.samples
    assert equal(final(tmp_path), undisturbed)


@pytest.mark.parametrize('goes', [None, 0])
def test_the_state_comes_from_a_node_that_stays_where_that_of_rank_0_goes(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    goes: int | None,
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(
        [fork_server, neighbour, fork_server], ordered, 3, tmp_path, train, endless=1
    ) as gang:
        left = stopped_and_left(gang, heir=1, goes=goes)
    shutil.move(left.path, tmp_path / 'elsewhere')  # so it cannot be read
    with ranks(
        [neighbour, fork_server], replace(ordered, fragment=2, handover=left), 2, tmp_path, train
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(Started)[0].samples == left.samples
        assert all('as it is in memory' in rank.log.read_text() for rank in gang.ranks)
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
    train(ctx, kill=(2, 0, 0) if fault == 'its first step' else None, endless=endless)


@pytest.mark.parametrize(
    ('fault', 'ends'),
    [
        ('', {'finished'}),
        ('its first step', {None, 'peer-lost'}),
        ('before-commit', {None, 'peer-lost'}),
        ('committed', {None, 'peer-lost'}),
        ('no room on the disk', {'error', 'peer-lost'}),
        ('the node', set()),
    ],
)
def test_a_large_state_is_committed_by_the_next_fragment_whatever_happens_to_that(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    undisturbed: dict[str, torch.Tensor],
    fault: str,
    ends: set[str | None],
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    store = PosixCheckpointStore(tmp_path / 'store', 'digits')
    with ranks([fork_server, neighbour], ordered, 2, tmp_path, large, fault) as gang:
        left = stopped_and_left(gang, heir=1, followed=True)
    assert left.path == '' and store.latest() is None
    again: Handover | None = left
    if ends:
        following = replace(ordered, fragment=2, handover=left)
        with ranks([neighbour, fork_server], following, 2, tmp_path, large, fault) as gang:
            assert {outcome.how for outcome in gang.run()} == ends
            assert gang.ranks[0].said(Started)[0].samples == left.samples
        if 'error' in ends:
            assert 'cannot be written' in gang.ranks[0].outcome.error.message
            again = None  # what the executor does after an error
    else:
        again = None  # the state is lost with its node, or with the executor, which knew of it
    if fault:
        with ranks(
            [neighbour, fork_server],
            replace(ordered, fragment=3, handover=again),
            2,
            tmp_path,
            large,
        ) as gang:
            assert {outcome.how for outcome in gang.run()} == {'finished'}
            assert gang.ranks[0].said(Started)[0].samples == (left.samples if again else 0)
    assert equal(final(tmp_path), undisturbed)


def test_a_fragment_commits_what_it_began_with_before_it_leaves_more_in_memory(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, 1, tmp_path, large) as gang:
        left = stopped_and_left(gang, followed=True)
    following = replace(ordered, fragment=2, handover=left)
    with ranks(fork_server, following, 1, tmp_path, large, endless=2) as gang:
        assert stopped_and_left(gang, followed=True).samples > left.samples
    latest = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
    assert latest is not None and latest.samples >= left.samples


def test_nothing_is_left_where_no_node_is_known_to_stay(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    with ranks(
        fork_server, order(tmp_path, total_samples=TOTAL), 2, tmp_path, train, endless=1
    ) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(Progress)))
        for rank in gang.ranks:
            rank.process.send(StopTraining('test'))
        assert [(outcome.how, outcome.left) for outcome in gang.run()] == [('stopped', None)] * 2


def sabotaged(ctx: FragmentContext, fault: str) -> None:
    import resource

    from parsl_freetrain.training.loop import checkpointer, handover_send

    def too_large(state: State) -> tuple[int, torch.Tensor]:
        return pack(
            replace(state, tensors={'x': torch.zeros(1).expand(1 << 50)})
        )  # a copy of it has no room anywhere

    def dies(*_: object) -> None:
        os.kill(os.getpid(), 9)

    vars(checkpointer)['LARGE_BYTES'] = 0
    match fault, ctx.rank:
        case 'the heir has no memory', 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # of its files in memory, too
        case 'rank 0 has no memory', 0:
            vars(handover_send)['pack'] = too_large
        case 'the heir dies', 1:
            vars(handover_send)['_room'] = dies
        case 'rank 0 dies', 0:
            vars(handover_send)['pack'] = dies
    train(ctx, endless=1)


@pytest.mark.parametrize(
    ('fault', 'ends', 'who', 'says'),
    [
        ('the heir has no memory', ['stopped', 'stopped'], 1, 'There is no memory for a state of'),
        (
            'rank 0 has no memory',
            ['stopped', 'stopped'],
            0,
            'The state could not be left in memory',
        ),
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
    with ranks(
        [fork_server, neighbour],
        order(tmp_path, total_samples=TOTAL),
        2,
        tmp_path,
        sabotaged,
        fault,
    ) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(Progress)))
        gang.ranks[1].process.send(NodeStays())
        for rank in gang.ranks:
            rank.process.send(StopTraining('test', followed=True))
        outcomes = gang.run()
        assert [outcome.how for outcome in outcomes] == ends
        assert says in gang.ranks[who].log.read_text()
    assert not any(outcome.left for outcome in outcomes)
    if ends[0] is not None:
        latest = PosixCheckpointStore(tmp_path / 'store', 'digits').latest()
        assert latest is not None
        assert (latest.path, latest.samples) == (outcomes[0].path, outcomes[0].samples)
        assert latest.samples > 0


@pytest.mark.parametrize(('size', 'who'), [(1 << 50, 0), (256 << 20, 1)])
def test_where_memory_is_too_short_for_the_state_the_checkpoint_is_used(
    fork_server: ForkClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: dict[str, torch.Tensor],
    size: int,
    who: int,
) -> None:
    mark = str(tmp_path / 'prepared')
    ordered = order(tmp_path, total_samples=TOTAL)
    with ranks(fork_server, ordered, 2, tmp_path, train, endless=1) as gang:
        left = stopped_and_left(gang)
    large = replace(left, digest='0' * 64)
    monkeypatch.setenv(FORK_SERVER_VARIABLE, address_of(fork_server.name)[1:].decode())
    fd = os.memfd_create('state')
    os.ftruncate(fd, size)  # takes no memory until it is read
    assert keep(ordered.trainer, fd, large.digest)
    os.close(fd)
    with running_ahead(fork_server, ordered, 2, tmp_path, at_prepare=mark) as asked:
        assert all(channel.poll(LIMIT_S) for channel in asked)
    for pid in (int(path.suffix[1:]) for path in tmp_path.glob('prepared.*')):
        if os.readlink(f'/proc/{pid}/fd/1') == str(tmp_path / 'ahead-1.log'):
            has = int(Path(f'/proc/{pid}/statm').read_text().split()[0]) * os.sysconf(
                'SC_PAGE_SIZE'
            )
            resource.prlimit(pid, resource.RLIMIT_AS, (has + (160 << 20),) * 2)
    with ranks(
        fork_server,
        replace(ordered, fragment=2, handover=large),
        2,
        tmp_path / 'logs',
        train,
        at_prepare=mark,
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert gang.ranks[0].said(Started)[0].samples == left.samples
        assert ['could not be had from memory' in rank.log.read_text() for rank in gang.ranks] == [
            who == 0,
            who == 1,
        ]
    assert equal(final(tmp_path), undisturbed)


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


@pytest.mark.parametrize('before', [Shape(spatial=(1, 1, 2)), Shape(pipeline=2)], ids=str)
def test_another_shape_goes_on_with_the_state_in_memory(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, before: Shape
) -> None:
    """From where rank 1 was; of a pipeline it has half."""
    ordered = order(tmp_path, total_samples=50 * BATCH, mode='throughput', shape=before)
    got = str(tmp_path / 'got')
    cloudpickle.register_pickle_by_value(sys.modules[Net.__module__])
    with ranks([fork_server, neighbour], ordered, 2, tmp_path, keeps_what_it_got, got) as gang:
        left = stopped_and_left(gang, heir=1)
    committed = read_state(left.path)
    shutil.move(left.path, tmp_path / 'elsewhere')
    with ranks(
        [neighbour, fork_server],
        replace(ordered, fragment=2, shape=Shape(data=2), handover=left),
        2,
        tmp_path,
        keeps_what_it_got,
        got,
    ) as gang:
        assert {outcome.how for outcome in gang.run()} == {'finished'}
        assert all('as it is in memory' in rank.log.read_text() for rank in gang.ranks)
    for rank in range(2):
        model, optimizer = torch.load(f'{got}-2-{rank}', weights_only=True)
        assert equal(model, committed.models[0])
        moments = {
            name: state['exp_avg']
            for name, state in zip(model, optimizer['state'].values(), strict=True)
        }
        assert equal(
            moments,
            {
                name.partition('.')[2]: state['exp_avg']
                for name, state in committed.optimizers[0]['state'].items()
            },
        )
        assert len(moments) == 2 * LAYERS


def test_a_rank_that_nobody_wants_ends(fork_server: ForkClient, tmp_path: Path) -> None:
    mark = str(tmp_path / 'prepared')
    with running_ahead(fork_server, order(tmp_path), 1, tmp_path, wait_s=0.2, at_prepare=mark) as (
        asked,
    ):
        assert asked.poll(LIMIT_S)
        pid = int(next(tmp_path.glob('prepared.*')).suffix[1:])
        assert is_true(lambda: not Path(f'/proc/{pid}').exists())
        assert not (tmp_path / 'ahead-0.log').exists()


def test_what_differs_is_not_taken_over_and_a_second_one_replaces_the_first(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    mark = str(tmp_path / 'prepared')

    def pids() -> set[int]:
        return {int(path.suffix[1:]) for path in tmp_path.glob('prepared.*')}

    with running_ahead(
        fork_server, order(tmp_path, total_samples=128), 1, tmp_path, at_prepare=mark
    ) as (asked,):
        assert asked.poll(LIMIT_S)
        (first,) = pids()
    with running_ahead(
        fork_server, order(tmp_path, total_samples=128), 1, tmp_path, at_prepare=mark
    ) as (asked,):
        assert asked.poll(LIMIT_S)
        assert is_true(lambda: not Path(f'/proc/{first}').exists())
    (second,) = pids() - {first}
    with ranks(
        fork_server, order(tmp_path, seed=8, total_samples=128), 1, tmp_path, train, at_prepare=mark
    ) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
        assert gang.ranks[0].process.pid not in (first, second)
    with ranks(
        fork_server,
        order(tmp_path, fragment=2, total_samples=128),
        1,
        tmp_path,
        train,
        at_prepare=mark,
    ) as gang:
        (outcome,) = gang.run()
        assert gang.ranks[0].process.pid == second
        assert 'the seed has changed from 8 to 7' in outcome.error.message


def reads_first(ctx: FragmentContext, where: str, data: bytes) -> None:
    """As one that reads a long time: until there is a file ``go``."""
    (Path(where) / f'reads.{os.getpid()}').touch()
    while not (Path(where) / 'go').exists():
        time.sleep(0.01)
    raise LookupError(f'fragment {ctx.fragment}')


def test_a_rank_that_still_runs_ahead_is_taken_at_once(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    data = bytes(5_000_000)  # more than a socket holds for somebody who does not read
    with running_ahead(
        fork_server,
        order(tmp_path),
        1,
        tmp_path,
        function=reads_first,
        where=str(tmp_path),
        data=data,
    ):
        assert is_true(lambda: bool(list(tmp_path.glob('reads.*'))))
    (reads,) = tmp_path.glob('reads.*')
    with ranks(
        fork_server,
        order(tmp_path, fragment=2),
        1,
        tmp_path,
        reads_first,
        where=str(tmp_path),
        data=data,
    ) as gang:
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
    with ranks(
        fork_server,
        order(tmp_path / 'other', trainer='other'),
        1,
        tmp_path / 'other',
        reads_first,
        where=str(tmp_path),
        data=b'',
    ):
        assert is_true(lambda: not Path(f'/proc/{pid}').exists())
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


def test_only_a_rank_that_is_wanted_and_lives_is_given_to_a_launch(
    sleepers: Callable[[], StandbyRank],
) -> None:
    slots, (ours, theirs) = StandbySlots(), channel_pair()
    first, second, third = (sleepers() for _ in range(3))
    with closing(ours), closing(theirs):
        slots.add(first)
        slots.add(second)  # so the first one has been killed; it has not been reaped
        assert slots.claim(launch(), ours) == second
        assert theirs.recv() == RankPid(second.pid, has_payload=True)
        assert slots.claim(launch(), ours) is None
        slots.add(third)
        os.kill(third.pid, 9)
        assert os.waitid(os.P_PID, third.pid, os.WEXITED | os.WNOWAIT)
        assert slots.claim(launch(), ours) is None
    for rank in (first, second, third):
        os.close(rank.pidfd)


def test_ranks_ahead_end_some_time_after_their_trainer_has_left_the_node(
    sleepers: Callable[[], StandbyRank],
) -> None:
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
    fork_server: ForkClient, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    ordered = order(tmp_path, total_samples=TOTAL)
    given: dict[str, Any] = {'where': str(tmp_path), 'endless': 1}
    with ranks(fork_server, ordered, 1, tmp_path, locks, **given) as gang:
        gang.hear(lambda: bool(gang.ranks[0].said(Progress)))
        with running_ahead(fork_server, ordered, 1, tmp_path, function=locks, **given) as (asked,):
            assert asked.poll(LIMIT_S)
            with pytest.raises(EOFError):  # it has ended, and does not wait
                asked.recv()
        first, ahead = (tmp_path / 'tried').read_text().split()
        assert is_true(lambda: not Path(f'/proc/{ahead}').exists())
        left = stopped_and_left(gang)
    following = replace(ordered, fragment=2, handover=left)
    with ranks(fork_server, following, 1, tmp_path, locks, **given) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
        assert gang.ranks[0].process.pid not in (int(first), int(ahead))
    assert equal(final(tmp_path), undisturbed)


def fails_before(ctx: FragmentContext) -> None:
    raise LookupError('not there')


def test_what_goes_wrong_ahead_goes_wrong_again_in_the_fragment(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    with running_ahead(fork_server, order(tmp_path), 1, tmp_path, function=fails_before) as (
        asked,
    ):
        assert asked.poll(LIMIT_S)
        assert is_true(lambda: not (tmp_path / 'ahead-0.log').exists())  # it has been reaped
    with ranks(fork_server, order(tmp_path), 1, tmp_path, fails_before) as gang:
        (outcome,) = gang.run()
    assert (outcome.how, outcome.error.message) == ('error', 'not there')


def test_a_state_is_the_same_when_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_image, '_BLOCK', 32)  # the digest is one of several blocks
    tensors = {
        'a': torch.randn(3, 5),
        'b': torch.tensor(7),
        'c': torch.randn(4, dtype=torch.float64)[::2].to(torch.complex64).conj(),
        'd': torch.zeros(0, 2, dtype=torch.bfloat16),
        'e': torch.tensor([True, False]),
    }
    structure = {'rest': {'x': [1, (2, None)], 3: {'y': 1.5}}, 'paths': {'a': ('x', 1)}}
    fd, packed = pack(State(tensors, structure))
    with os.fdopen(fd, 'rb') as file:
        file.seek(0)
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    digest = digest_of(packed)
    assert digest_of(data) == digest
    again = unpack(data)
    assert again.structure == structure
    assert equal(again.tensors, {name: tensor.resolve_conj() for name, tensor in tensors.items()})
    data[-1] ^= 1
    assert digest_of(data) != digest


class Flipping(Alone):
    """A network that changes a bit."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor[-1] ^= 1


@pytest.mark.parametrize('peers', [Alone(), Flipping()])
def test_what_the_network_has_changed_is_not_used(
    fork_server: ForkClient, monkeypatch: pytest.MonkeyPatch, peers: Alone
) -> None:
    monkeypatch.setenv(FORK_SERVER_VARIABLE, address_of(fork_server.name)[1:].decode())
    model = nn.Linear(3, 2)
    prepared = sort_out((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    fd, data = pack(collect(content_of(prepared), Position(8, 16, 7, 64, 8, 0)))
    digest = digest_of(data)
    assert keep('net', fd, digest)
    os.close(fd)
    own = fetch('net', digest, again=True)
    assert own is not None
    own.zero_()  # what is kept stays as it is
    saved = receive(Handover(digest, '/c/8', 8, 1), 'net', peers)
    if type(peers) is Flipping:
        assert saved is None
    else:
        assert saved is not None
        assert (saved.path, saved.position.samples) == ('/c/8', 8)
        assert equal(saved.models[0], model.state_dict())
    assert receive(Handover(digest, '/c/8', 8, 1), 'net', Alone()) is None  # it is given away once
