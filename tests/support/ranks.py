"""Ranks of one fragment started through a real warm parent, and what they said: the member's part, for tests."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain.training.context import FragmentContext
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.warm import RankProcess, WarmParent

Message = dict[str, Any]


def order(folder: Path, fragment: int = 1, **changes: Any) -> FragmentOrder:
    """An order for tests, with its checkpoints in ``folder/store``."""
    return FragmentOrder(**{
        'trainer': 'digits', 'fragment': fragment, 'store': str(folder / 'store'), 'total_samples': 100, 'total_epochs': None,
        'mode': 'reproducible', 'shards': 4, 'seed': 7, 'deadline': None, 'checkpoint_every_s': 3600.0, 'interface': 'lo', **changes})


@dataclass
class Rank:
    """One rank: its process, its messages, and its exit status once it is over."""

    process: RankProcess
    place: RankPlace
    log: Path
    messages: list[Message] = field(default_factory=list)
    status: int | None = None

    def said(self, kind: str) -> list[Message]:
        """Its messages of a kind."""
        return [message for message in self.messages if message['kind'] == kind]

    @property
    def outcome(self) -> Message:
        """Its last word; fails with its log if there is none."""
        found = self.said('outcome')
        assert found, f'no outcome, status {self.status}:\n{self.log.read_text()}'
        return found[0]


class Ranks:
    """The ranks of one fragment; those of several warm parents are on as many nodes, one after the other."""

    def __init__(self, parent: WarmParent | Sequence[WarmParent], ordered: FragmentOrder, world_size: int, folder: Path,
                 function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        # As from a notebook: the ranks cannot import what a test defines, nor what is defined here.
        for name in (function.__module__, __name__):
            cloudpickle.register_pickle_by_value(sys.modules[name])
        payload = cloudpickle.dumps((function, args, kwargs))
        folder.mkdir(parents=True, exist_ok=True)
        self.launched_at = time.time()
        self.ranks: list[Rank] = []
        parents = [parent] if isinstance(parent, WarmParent) else parent
        for rank in range(world_size):
            log = folder / f'f{ordered.fragment}-r{rank}.log'
            place = RankPlace(rank, world_size, rank, 1, str(log))
            self.ranks.append(Rank(parents[rank % len(parents)].launch(ordered, place, payload, {}), place, log))

    def hear(self, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Pass messages on until a condition holds, or all ranks are over."""
        deadline = time.monotonic() + timeout_s
        while not until() and (running := [rank for rank in self.ranks if rank.status is None]):
            ready = wait([rank.process.fileno() for rank in running], max(deadline - time.monotonic(), 0.0))
            assert ready, 'nothing more was heard; logs:\n' + '\n'.join(rank.log.read_text() for rank in self.ranks)
            for rank in running:
                if rank.process.fileno() in ready:
                    self._take(rank)

    def run(self, timeout_s: float = 60.0) -> list[Message]:
        """Pass messages on until all ranks are over; their outcomes (a killed rank's is empty)."""
        self.hear(lambda: False, timeout_s)
        return [(rank.said('outcome') or [{}])[0] for rank in self.ranks]

    def close(self) -> None:
        """Leave nothing behind."""
        for rank in self.ranks:
            rank.process.close()

    def _take(self, rank: Rank) -> None:
        message = rank.process.recv()
        rank.messages.append(message)
        if message['kind'] == 'exit':
            rank.status = message['status']
        if message['kind'] == 'rendezvous':
            for other in self.ranks[1:]:
                other.process.send(message)


@contextmanager
def ranks(parent: WarmParent | Sequence[WarmParent], ordered: FragmentOrder, world_size: int, folder: Path, function: Callable[..., Any],
          *args: Any, **kwargs: Any) -> Iterator[Ranks]:
    """Started ranks, ended on the way out."""
    started = Ranks(parent, ordered, world_size, folder, function, *args, **kwargs)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def warm_parent(folder: Path, *options: str) -> Iterator[WarmParent]:
    """A warm parent that has torch imported, with its log in ``folder``; ended on the way out."""
    parent = WarmParent.start(f'tests-{secrets.token_hex(8)}', os.getpid(), str(folder / 'warm.log'), *options)
    try:
        parent.wait_ready(120)
        yield parent
    finally:
        parent.stop()


def finish(ctx: FragmentContext) -> None:
    """What a fragment has to do to end well; for functions of ranks that have something else to show."""
    model = nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(TensorDataset(torch.ones(4, 1)), 4):
        model(x).sum().backward()
        optimizer.step()
