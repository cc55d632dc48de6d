"""Nothing hangs: ranks, workers and managers that are really killed or stopped."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import parsl_freetrain as ft
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.testing import kill_at, with_faults
from tests.support.faults import slow_rank, stop_at
from tests.support.processes import Started, command_line, forks, victims
from tests.support.training import fit, freetrain
from tests.support.waiting import under_load, wait_until

HANG_S = 6.0
EVER = 100_000  # epochs


def fragments(executor: ft.FreeTrainExecutor) -> list[Any]:
    with Journal(executor.ledger_path) as ledger:
        return list(ledger.history().fragments)


@contextlib.contextmanager
def training(
    folder: Path,
    *faults: Any,
    nodes: int = 2,
    pause_s: float = 0.1,
    epochs: int = EVER,
    function: Any = fit,
    ahead: bool = False,
    **settings: Any,
) -> Iterator[tuple[ft.FreeTrainExecutor, ft.TrainingFuture]]:
    """A training on all nodes that goes on until it is left."""
    trainer = ft.freetrain_app(
        min_nodes=min(nodes, settings.pop('min_nodes', nodes)),
        max_nodes=nodes,
        total_epochs=epochs,
        checkpoints=ft.Checkpoints(every_s=0.3),
        ranks=ft.Ranks(ahead=ahead),
        scaling=ft.Scaling(rate={1: 1.0, 2: 1.9}, rescale_up_s=0.1, rescale_down_s=0.1),
    )
    site = ft.LocalSite(nodes=nodes, poll_s=0.2)
    with freetrain(folder, site, **{'hang_s': HANG_S, 'stop_grace_s': 1.0, **settings}) as executor:
        yield executor, trainer(with_faults(function, *faults))(pause_s=pause_s, trainer_name='fit')


def dies_when_the_next_ranks_are_there(ctx: ft.FragmentContext, **options: Any) -> None:
    class Struck:
        def __getattr__(self, name: str) -> Any:
            return getattr(ctx, name)

        def report(self, **numbers: float) -> None:
            if (ctx.fragment, ctx.rank) == (1, 1):
                ahead = list(Path(os.readlink('/proc/self/fd/1')).parent.glob('ahead-of-000001-*'))
                if len(ahead) == 2 and all('device' in log.read_text() for log in ahead):
                    os.kill(os.getpid(), signal.SIGKILL)

    fit(Struck(), **options)  # type: ignore[arg-type]


def test_after_a_kill_the_next_fragment_is_made_of_the_ranks_ahead(tmp_path: Path) -> None:
    with training(tmp_path, function=dies_when_the_next_ranks_are_there, ahead=True) as (
        executor,
        _,
    ):
        wait_until(
            lambda: len(found := fragments(executor)) >= 2 and found[1].started_at,
            'it does not go on',
        )
        first = fragments(executor)[0]
        for log in (tmp_path / 'checkpoints/fit/logs').glob('fragment-000002-rank-*.log'):
            pid = re.search(r'Process (\d+): device', log.read_text())
            assert pid is not None
            assert psutil.Process(int(pid[1])).create_time() < first.ended_at


KILLED = r'rank 1 on slot\d\d was ended by SIGKILL; its output is in .*rank-1\.log'
STOPPED = r'rank 1 on slot\d\d was stopped \(SIGSTOP'


@pytest.mark.parametrize(
    ('faults', 'whys'),
    [
        ([kill_at(1, 5), stop_at(1, 5, fragment=2)], [KILLED, STOPPED]),
        # Rank 1 is stopped while it waits for rank 0, so within the exchange.
        pytest.param(
            [slow_rank(0, 2.0, step=5, fragment=1), stop_at(1, 5, after_s=1.0)],
            [STOPPED],
            marks=pytest.mark.long,
        ),
    ],
    ids=['killed, then stopped', 'stopped in exchange'],
)
def test_a_rank_that_dies_or_stops_ends_its_fragment_in_time_and_is_named(
    tmp_path: Path, faults: list[Any], whys: list[str]
) -> None:
    count = len(whys)
    with training(tmp_path, *faults) as (executor, future):
        wait_until(lambda: future.progress().preempted == count, 'a fragment does not end')
        wait_until(
            lambda: len(fragments(executor)) == count + 1 and future.progress().nodes == 2,
            'its nodes are not used again',
        )
        found = fragments(executor)
        for first, second, why in zip(found[:-1], found[1:], whys, strict=True):
            assert first.ending == 'preempted'
            # It had to come to the fault first.
            assert first.ended_at - first.started_at < HANG_S + under_load(1.0)
            assert second.launched.at - first.ended_at < under_load(1.0)
            assert set(second.nodes) == set(first.nodes)
            assert re.search(why, first.error), first.error
        if whys[0] == KILLED:
            # What is done of a step is repeated, and no step that was done.
            first, second = found[:2]
            assert second.started_samples == first.samples == first.reached > 0
            log = (tmp_path / 'checkpoints/fit/logs/fragment-000002-rank-0.log').read_text()
            in_memory = f'from the state in memory, with {first.samples} samples' in log
            assert in_memory or f'ckpt-{first.samples:012d}-' in log  # there may be one as new


@pytest.fixture
def started() -> Started:
    """The processes of this test: its pytest worker may keep a fork server of other tests."""
    return Started()


def of_node(started: Started, node: str) -> list[psutil.Process]:
    """A node's first process, manager and the manager's children; no rank or fork server."""
    found = []
    for process in started.processes():
        with contextlib.suppress(psutil.Error):
            if process.environ().get('FREETRAIN_NODE') == node:
                found.append(process)
    return found


Pick = Callable[[Started, str], psutil.Process]


def worker(started: Started, node: str) -> psutil.Process:
    """The process that runs the node's member: the last that the manager has started."""
    return [p for p in of_node(started, node) if "a node's workers" in command_line(p)][-1]


def manager(started: Started, node: str) -> psutil.Process:
    command = 'python3 -P -m parsl_freetrain.executor.block.manager'  # not as an argument
    return next(p for p in of_node(started, node) if command_line(p).startswith(command))


def rank(started: Started, node: str) -> psutil.Process:
    """The newest one, on whichever node it is."""
    mine = victims('rank', started.processes())
    return next(p for p in reversed(started.processes()) if p in mine)


@pytest.mark.parametrize('victim', [worker, pytest.param(manager, marks=pytest.mark.long)])
def test_a_node_that_is_stopped_is_lost_in_time_and_the_others_go_on(
    tmp_path: Path, started: Started, victim: Pick
) -> None:
    """SIGSTOP to what runs the node: its fragment ends, the good node trains on."""
    with training(tmp_path, min_nodes=1, nodes=2, heartbeat_period=1) as (executor, future):
        wait_until(
            lambda: (
                bool(rows := fragments(executor))
                and len(rows[-1].nodes) == 2
                and rows[-1].started_at is not None
            ),
            'it does not start on both nodes',
        )
        running = fragments(executor)[-1].number
        bad = victim(started, 'slot01')
        ranks = set(forks(started.processes()))
        bad.suspend()
        stopped_at = time.time()
        if victim is manager:  # which matters when it shall pass on that its ranks have ended
            with contextlib.suppress(psutil.Error):
                rank(started, 'slot01').kill()
        wait_until(lambda: len(fragments(executor)) > running, 'the good node is not used again')
        ended = fragments(executor)[running - 1]
        after = fragments(executor)[running]
        assert ended.ending == 'preempted'
        # The manager may have been stopped before it had the task.
        assert ended.ended_at - stopped_at < HANG_S + under_load(4.0)
        assert len(after.nodes) == 1
        assert after.launched.at - ended.ended_at < under_load(1.0)
        why = (
            r'1 of its 2 nodes were lost: \w+ \((no sign of life|its ranks ended, and its '
            r'Parsl manager|its manager)'
        )
        assert re.search(why, ended.error), ended.error
        since = future.progress().samples
        wait_until(lambda: future.progress().samples > since + 96, 'it does not go on')
        # A fork server and a rank for each good node; the bad one's ranks are gone although nobody
        # there could end them.
        wait_until(
            lambda: len(ranks.intersection(forks(started.processes()))) <= 2 + 1,
            'ranks are left on the bad node',
        )
        if victim is worker:
            bad.resume()
            wait_until(lambda: future.progress().nodes == 2, 'the node is not used again')


def test_steps_that_take_longer_than_a_hang_are_none(tmp_path: Path) -> None:
    with training(tmp_path, slow_rank(0, 6.0, step=3), hang_s=2.0, epochs=1, pause_s=0.0) as (
        executor,
        future,
    ):
        wait_until(lambda: future.progress().samples >= 32, 'no slow step is trained')
        assert future.progress().fragments == 1
        assert future.progress().preempted == 0
        assert fragments(executor)[0].ended_at is None


def as_the_scheduler_does(started: Started, node: str, number: int) -> None:
    """A signal to every process of a node; the ranks of this computer are all on it here."""
    for process in [*of_node(started, node), *forks(started.processes())]:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


@pytest.mark.parametrize(
    ('number', 'one'),
    [(signal.SIGTERM, rank), pytest.param(signal.SIGUSR1, worker, marks=pytest.mark.long)],
)
def test_a_signal_ends_a_fragment_and_costs_no_work(
    tmp_path: Path, started: Started, number: int, one: Pick
) -> None:
    """As a scheduler that warns, or preempts: to everything on the node at once. The fragment saves
    and ends; nothing starts there again. A request to one process alone stops its fragment, too.
    """
    signals: tuple[Callable[[], None], ...] = (
        lambda: as_the_scheduler_does(started, 'slot00', number),
        lambda: one(started, 'slot00').terminate(),
    )
    with training(tmp_path, nodes=1, idle_block_s=1.0) as (executor, future):
        for count, give in enumerate(signals, 1):
            before = future.progress().samples
            wait_until(lambda: future.progress().samples > before + 96, 'it does not train')  # noqa: B023
            give()
            wait_until(lambda: future.progress().fragments > count, 'it does not end and go on')  # noqa: B023
    found = fragments(executor)
    for first, second in itertools.pairwise(found[: len(signals) + 1]):
        assert first.ending == 'stopped', first.error
        assert first.samples == first.reached > first.launched.samples + 96
        assert second.launched.samples == first.samples
    assert set(found[1].nodes).isdisjoint(found[0].nodes)  # managers of another block
    assert future.progress().preempted == 0


def never_ends(ctx: ft.FragmentContext) -> None:
    class Stuck:
        def __getattr__(self, name: str) -> Any:
            return getattr(ctx, name)

        def report(self, **numbers: float) -> None:
            while ctx.rank == 1:
                pass

    fit(Stuck())  # type: ignore[arg-type]


def test_an_endless_loop_ends_its_fragment_with_a_sentence(tmp_path: Path) -> None:
    trainer = ft.freetrain_app(
        min_nodes=2,
        max_nodes=2,
        total_epochs=1,
        mode=ft.Throughput(),
        scaling=ft.Scaling(rate={1: 1.0, 2: 1.9}),
    )(never_ends)
    with freetrain(
        tmp_path, ft.LocalSite(nodes=2, poll_s=0.2), stop_grace_s=1.0, step_s=2.0
    ) as executor:
        trainer()
        wait_until(lambda: any(f.ending for f in fragments(executor)), 'the fragment does not end')
        first = fragments(executor)[0]
    assert first.ending == 'preempted'
    assert 'no training step ended within 2 s: its function is in an endless loop' in first.error


def leaves_an_exchange_out(ctx: ft.FragmentContext) -> None:
    """Rank 0 waits for what rank 1 never sends, and rank 1 for the next sum."""
    import torch

    from parsl_freetrain.training.comm import exchange_watch

    exchange_watch.LEAST_S = exchange_watch.LOOK_S = 1.0

    def wait() -> None:
        if ctx.samples >= 32 and ctx.rank == 0:
            ctx._run.peers.recv(torch.zeros(1), 1)

    ctx.before_step(wait)
    fit(ctx)


def test_ranks_that_wait_for_each_other_for_ever_are_ended_and_named(tmp_path: Path) -> None:
    trainer = ft.freetrain_app(
        min_nodes=2, max_nodes=2, total_epochs=50, scaling=ft.Scaling(rate={1: 1.0, 2: 1.9})
    )(leaves_an_exchange_out)
    with freetrain(tmp_path, ft.LocalSite(nodes=2, poll_s=0.2), stop_grace_s=1.0) as executor:
        trainer()
        wait_until(lambda: any(f.ending for f in fragments(executor)), 'the fragment does not end')
        first = fragments(executor)[0]
        assert first.ending == 'preempted'
        words = r'all of its ranks waited for each other, rank 0 in recv, rank 1 in \w+'
        assert re.search(words, first.error), first.error
        logs = sorted(tmp_path.rglob('fragment-000001-rank-*.log'))
        assert len(logs) == 2
        for log in logs:
            assert 'This rank has waited in' in log.read_text()
            assert 'most recent call first' in log.read_text()


@pytest.mark.parametrize('hang_s', [0.0, 1.9, math.inf, math.nan])
def test_a_limit_that_cannot_be_kept_is_refused(hang_s: float) -> None:
    with pytest.raises(ft.BadInput, match='hang_s is'):
        ft.Timeouts(hang_s=hang_s)
