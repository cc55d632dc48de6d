"""Another program takes the place of a rank: at its port, or in the store of the addresses."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from parsl_freetrain.training.comm.collectives import RankGroup
from parsl_freetrain.training.spec.fragment_order import RankPlace
from tests.support.ranks import order
from tests.support.waiting import LIMIT_S, wait_until

FORGED = 'group/0//cpu//0/1'
"""Where the address of rank 1 stands in the store."""
ROUNDS = 20
"""Which of two ranks waits for the other one is gloo's choice, new for each group."""


def rank(number: int, port: int, folder: Path, late: int) -> None:
    """Make groups until one fails; ``late``: the rank that waits for the attack on each."""
    store = TCPStore('127.0.0.1', port, 2, number == 0, timedelta(60), wait_for_workers=False)
    plain = dist.init_process_group

    def begin(*args: object, **options: object) -> None:
        if number == late:
            wait_until((folder / f'attacked-{again}').exists)
        plain(*args, **options)  # type: ignore[arg-type]

    dist.init_process_group = begin
    sys.stdout = (folder / f'said-{number}').open('w', buffering=1)
    place = RankPlace(number, 2, 0, 1, '', '127.0.0.1')
    try:
        for again in range(ROUNDS):
            RankGroup(order(folder), place, PrefixStore(str(again), store), 'secret', '')
            dist.destroy_process_group()
            print('joined')
    except Exception as error:
        print(type(error).__name__, error)


def connects(to: tuple[str, int]) -> list[socket.socket]:
    """As all of the peers that a rank may wait for."""
    taken = [socket.create_connection(to) for _ in range(8)]
    for number, sock in enumerate(taken):
        sock.settimeout(0.05)
        sock.sendall(struct.pack('<q', number))
    return taken


def echoes(taken: list[socket.socket]) -> bool:
    """What a rank says is what it hears."""
    for sock in taken:
        with contextlib.suppress(OSError):
            sock.sendall(sock.recv(1 << 16))
    return False


def said(folder: Path, number: int) -> str:
    path = folder / f'said-{number}'
    return path.read_text() if path.exists() else ''


@pytest.mark.parametrize('at', ['the port', 'the store'])
def test_a_rank_whose_peer_is_another_program_ends_with_a_sentence(at: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context('fork')  # which has imported torch
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = int(free.getsockname()[1])
    late, victim = (0, 1) if at == 'the port' else (1, 0)
    ranks = [context.Process(target=rank, args=(n, port, tmp_path, late)) for n in (0, 1)]
    try:
        for process in ranks:
            process.start()
        asked = psutil.Process(ranks[1].pid)

        def listens() -> list[tuple[str, int]]:
            return [c.laddr[:2] for c in asked.net_connections() if c.status == 'LISTEN']

        known = set[tuple[str, int]]()  # of earlier groups: between two there may be no gap to see
        for again in range(ROUNDS):
            if at == 'the port':
                (to, *_) = wait_until(lambda: {*listens()} - known)
                known.add(to)
                taken = connects(to)
                (tmp_path / f'attacked-{again}').touch()
            else:
                wait_until(lambda: psutil.Process(ranks[0].pid).net_connections())
                store: Any = TCPStore('127.0.0.1', port, None, False, timedelta(seconds=LIMIT_S))
                store.set(f'0/{FORGED}', store.get(f'0/{FORGED[:-1]}0'))
                taken = []
            wait_until(lambda: echoes(taken) or said(tmp_path, victim).count('\n') > again)  # noqa: B023
            if 'joined' not in said(tmp_path, victim).splitlines()[again]:
                break
        (tmp_path / 'attacked-0').touch()
        last = said(tmp_path, victim).splitlines()[-1]
        assert last.startswith('SealBroken') and 'nother program has' in last
    finally:
        for process in ranks:
            process.kill()
            process.join()
