"""Starts the ranks of one fragment through a real fork server, in place of its member."""

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import cloudpickle
import pytest
import torch
from msgspec import Struct, structs
from torch import nn
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from parsl_freetrain import Ranks as RankSettings
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.fork_client import ForkClient, RankProcess
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.training import TrainingSpec
from tests.support import template
from tests.support.waiting import LIMIT_S

M = TypeVar('M', bound=Struct)
KILLED: Any = SimpleNamespace(how=None, left=None)
"""The outcome of a rank that died without one."""


def order(folder: Path, fragment: int = 1, **changes: Any) -> FragmentOrder:
    """With its checkpoints in ``folder/store``; fields of the spec by name, the mode as text."""
    modes: dict[str, type[ft.Reproducible | ft.Throughput | ft.Scaled]] = {
        'reproducible': ft.Reproducible,
        'throughput': ft.Throughput,
        'scaled': ft.Scaled,
    }
    kind = modes[changes.pop('mode', 'reproducible')]
    given = {'shards': 4, 'seed': 7, **changes}
    mode = kind(**{name: given[name] for name in kind.__struct_fields__ if name in given})
    if 'scaled' in changes:
        mode = structs.replace(changes['scaled'], seed=given['seed'])
    epochs = changes.get('total_epochs')
    spec = TrainingSpec(
        min_nodes=1,
        max_nodes=max(changes.get('shapes', (1,))),
        shapes={nodes: (shape,) for nodes, shape in changes.get('shapes', {}).items()},
        goal=ft.Samples(changes.get('total_samples', 100)) if epochs is None else ft.Epochs(epochs),
        mode=mode,
        checkpoints=ft.Checkpoints(
            every_s=changes.get('checkpoint_every_s', 3600.0), keep=changes.get('keep', 3)
        ),
        ranks=RankSettings(
            threads=changes.get('threads', 1),
            per_node=changes.get('per_node', 1),
            share_devices=changes.get('share_devices', False),
        ),
    )
    own = {name: changes[name] for name in FragmentOrder.__dataclass_fields__ if name in changes}
    given = {'trainer': 'digits', 'fragment': fragment, 'store': str(folder / 'store')}
    return FragmentOrder(**{**given, 'spec': spec, 'deadline': None, 'interface': 'lo', **own})


@dataclass
class Rank:
    """One rank: its process, its messages, and its exit status after it has ended."""

    process: RankProcess
    place: RankPlace
    log: Path
    messages: list[msg.FromRank] = field(default_factory=list)
    status: int | None = None

    def said(self, kind: type[M]) -> list[M]:
        """Its messages of a kind."""
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def outcome(self) -> Any:
        """Its final message; fails with its log if there is none."""
        found = self.said(msg.Outcome)
        assert found, f'no outcome, status {self.status}:\n{self.log.read_text()}'
        return found[0]


class Ranks:
    """The ranks of one fragment; each fork server stands for one node."""

    def __init__(
        self,
        parent: ForkClient | Sequence[ForkClient],
        ordered: FragmentOrder,
        world_size: int,
        folder: Path,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # As from a notebook: the ranks cannot import the modules of the test and this module.
        for name in (function.__module__, __name__):
            cloudpickle.register_pickle_by_value(sys.modules[name])
        payload = cloudpickle.dumps((function, args, kwargs))
        folder.mkdir(parents=True, exist_ok=True)
        self.launched_at = time.time()
        self.ranks: list[Rank] = []
        parents = [parent] if isinstance(parent, ForkClient) else parent
        for rank in range(world_size):
            log = folder / f'f{ordered.fragment}-r{rank}.log'
            place = RankPlace(rank, world_size, rank, 1, str(log))
            self.ranks.append(
                Rank(parents[rank % len(parents)].launch(ordered, place, payload, {}), place, log)
            )

    def hear(self, until: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        """Pass messages on until a condition holds or all ranks have ended."""
        deadline = time.monotonic() + timeout_s
        while not until() and (running := [rank for rank in self.ranks if rank.status is None]):
            ready = wait(
                [rank.process.fileno() for rank in running], max(deadline - time.monotonic(), 0.0)
            )
            assert ready, 'nothing more was heard; logs:\n' + '\n'.join(
                rank.log.read_text() for rank in self.ranks
            )
            for rank in running:
                if rank.process.fileno() in ready:
                    self._take(rank)

    def run(self, timeout_s: float = LIMIT_S) -> list[Any]:
        """Pass messages on until all ranks have ended; their outcomes (:data:`KILLED`: none)."""
        self.hear(lambda: False, timeout_s)
        return [(rank.said(msg.Outcome) or [KILLED])[0] for rank in self.ranks]

    def close(self) -> None:
        """End all ranks."""
        for rank in self.ranks:
            rank.process.close()

    def _take(self, rank: Rank) -> None:
        message = rank.process.recv()
        assert message is not None
        rank.messages.append(message)
        if isinstance(message, msg.Exit):
            rank.status = message.status
        if isinstance(message, msg.Rendezvous):
            for other in self.ranks[1:]:
                other.process.send(message)


Channels = tuple[Channel[msg.ToRank], Channel[msg.FromRank]]


def channel_pair() -> Channels:
    """The rank's end and the node agent's end of a channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return (
        Channel(ours, msg.Decoder[msg.ToRank](msg.ToRank, 'the node agent')),
        Channel(theirs, msg.Decoder[msg.FromRank](msg.FromRank, 'a rank')),
    )


@contextmanager
def ranks(
    parent: ForkClient | Sequence[ForkClient],
    ordered: FragmentOrder,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Iterator[Ranks]:
    """Started ranks, which are ended at exit."""
    started = Ranks(parent, ordered, world_size, folder, function, *args, **kwargs)
    try:
        yield started
    finally:
        started.close()


def ended(*given: Any, **options: Any) -> list[Any]:
    """The outcomes of :func:`ranks`, however they end."""
    with ranks(*given, **options) as gang:
        return gang.run()


def in_ranks(
    parent: ForkClient,
    folder: Path,
    function: Callable[..., object],
    *args: Any,
    fragment: int = 1,
    world_size: int = 1,
    **options: Any,
) -> list[Any]:
    """The outcomes of a fragment, whose order has these ``options``."""
    ordered = order(folder, fragment, **options)
    return ended(parent, ordered, world_size, folder, function, *args)


def all_finish(*given: Any, **options: Any) -> list[Any]:
    """The outcomes of :func:`ranks` that all finish."""
    with ranks(*given, **options) as gang:
        outcomes = gang.run()
        hows = [outcome.how for outcome in outcomes]
        assert hows == ['finished'] * len(outcomes), (hows, gang.ranks[0].log.read_text()[-4000:])
    return outcomes


@contextmanager
def running_fork_server(folder: Path, of: str | None = None) -> Iterator[ForkClient]:
    """A fork server, forked from ``of`` or the session's template, ended at exit."""
    own, log = f'tests-{secrets.token_hex(8)}', str(folder / 'fork_server.log')
    parent = ForkClient.start(own, os.getpid(), log, of or template.name())
    try:
        parent.wait_ready(LIMIT_S)
        yield parent
    finally:
        parent.stop()


@pytest.fixture(scope='session')
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkClient]:
    """A fork server that has imported torch."""
    with running_fork_server(tmp_path_factory.mktemp('fork_server')) as parent:
        yield parent


@pytest.fixture(scope='session')
def neighbour(
    fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkClient]:
    """The fork server of another node."""
    with running_fork_server(tmp_path_factory.mktemp('fork_server'), fork_server.name) as parent:
        yield parent


def finish(ctx: ft.FragmentContext) -> None:
    """The calls that a fragment needs to end, for rank functions that test something else."""
    model = nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(TensorDataset(torch.ones(4, 1)), 4):
        model(x).mean().backward()
        optimizer.step()
