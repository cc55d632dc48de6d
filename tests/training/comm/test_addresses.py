"""The address of rank 0, on computers whose own name is an address that only they can use. Another
program takes the place of a rank: at its port, or in the store of the addresses.
"""

import contextlib
import multiprocessing
import socket
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from parsl_freetrain import FreeTrainError
from parsl_freetrain.host.network import is_loopback
from parsl_freetrain.training.comm.collectives import RankGroup, join
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.spec.fragment_order import RankPlace
from parsl_freetrain.training.spec.messages import Rendezvous
from tests.support.computers import INTERFACE, computers
from tests.support.programs import run_to_end
from tests.support.ranks import order
from tests.support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[3]
# Listens, or connects and says where rank 0 would be.
EXECUTOR = """
import socket
with socket.create_server(('10.99.0.1', 5555)) as server:
    print('listens', flush=True)
    server.accept()[0].close()
"""
MEMBER = """
import socket
socket.gethostbyname = lambda name: '127.0.1.1'  # as in /etc/hosts of many systems
from parsl_freetrain.executor.fragment.control_channel import reachable
from parsl_freetrain.host.network import own_address
from parsl_freetrain.training.comm.collectives import _listens_at
from parsl_freetrain.training.spec.fragment_order import RankPlace
from tests.support.ranks import order
from pathlib import Path
_, seen = reachable(['10.99.0.1'], 5555)
place = RankPlace(0, 2, 0, 2, '', seen)
print(own_address(), *_listens_at(order(Path('/'), interface=None), place))
"""


def test_rank_0_takes_the_address_by_which_its_node_reaches_the_executor() -> None:
    with (
        computers(2) as (login, node),
        subprocess.Popen(
            login.command([sys.executable, '-c', EXECUTOR]), stdout=subprocess.PIPE, text=True
        ) as executor,
    ):
        assert executor.stdout is not None and executor.stdout.readline() == 'listens\n'
        said = run_to_end(node.command([sys.executable, '-c', MEMBER]), cwd=ROOT, check=True).stdout
    assert said.split() == ['127.0.1.1', node.address, INTERFACE]


@pytest.mark.parametrize(
    ('address', 'loopback'),
    [('127.0.1.1', True), ('::1', True), ('localhost', True), ('10.0.0.1', False), ('n1', False)],
)
def test_an_address_of_this_computer_alone_is_told(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_on_another_node_an_address_of_rank_0_s_computer_alone_is_refused() -> None:
    told = Rendezvous('127.0.1.1', 5555, 'secret')
    inbox = cast(Inbox, SimpleNamespace(wait_for_rendezvous=lambda _: told))
    place = RankPlace(1, 2, 0, 2, '', '10.99.0.2')
    meet = join(order(Path('/'), interface=None), place, cast(Any, None), inbox, 'cpu')
    with pytest.raises(FreeTrainError, match=r'127\.0\.1\.1 .* other nodes cannot reach'):
        meet()


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
