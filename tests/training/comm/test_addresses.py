"""The address of rank 0, on computers whose own name is an address that only they can use."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parsl_freetrain import FreeTrainError
from parsl_freetrain.host.network import is_loopback
from parsl_freetrain.training.comm.collectives import join
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.spec.fragment_order import RankPlace
from parsl_freetrain.training.spec.messages import Rendezvous
from tests.support.computers import INTERFACE, computers
from tests.support.programs import run_to_end
from tests.support.ranks import order

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
