"""Stopped processes and networks that are gone, both real."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from parsl_freetrain.host.processes import is_stopped
from parsl_freetrain.testing import with_faults
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.linux import StopWatch, guard_connections
from tests.support.computers import INTERFACE, Computer, computers
from tests.support.faults import slow_rank
from tests.support.ranks import all_finish, order
from tests.support.waiting import under_load
from tests.training.loop.test_fragments import train

ROOT = Path(__file__).resolve().parents[3]
HANG_S, STEP_S = 4.0, 0.2

# A rank of its own, without a fork server: address of the store, rank.
PEER = """
import sys, time, torch
from torch.distributed import TCPStore
from parsl_freetrain import Samples
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.comm.collectives import EXCHANGE_TIMEOUT, RankGroup
from parsl_freetrain.training.comm.peers import PeerLost
from parsl_freetrain.training.comm.exchange_watch import exchanges
import os
host, os.environ['GLOO_SOCKET_IFNAME'], *numbers = sys.argv[1:]
rank, count, wait_s, hang_s = int(numbers[0]), int(numbers[1]), *map(float, numbers[2:])
spec = TrainingSpec(min_nodes=1, max_nodes=1, goal=Samples(1))
order = FragmentOrder('t', 1, '', spec, None, hang_s=hang_s)
store = TCPStore(host, 29400, count, rank == 0, timeout=EXCHANGE_TIMEOUT, wait_for_workers=False)
group = RankGroup(order, RankPlace(rank, count, 0, count, ''), store, 'secret', '')
def end(exchange):
    print('Another rank is gone:', exchange, flush=True)
    os._exit(0)
import threading
who = rank, print, group.broken, end
threading.Thread(target=exchanges.watch, args=who, daemon=True).start()
print('met', flush=True)
try:
    while True:
        rows = group.all_gather(torch.full((100_000,), float(rank)))
        assert [row[0].item() for row in rows] == list(range(count)), rows
        if rank == 0:
            time.sleep(wait_s)
        print('step', flush=True)
except PeerLost as error:
    print(str(error).replace(chr(10), ' ')[:300], flush=True)
os._exit(0)
"""


@contextmanager
def peers_on(hosts: Sequence[Computer]) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank on each of these, which have met."""
    peers = []
    for rank, host in enumerate(hosts):
        numbers = map(str, (rank, len(hosts), STEP_S, HANG_S))
        words = [sys.executable, '-c', PEER, '10.99.0.1', INTERFACE, *numbers]
        command = host.command(words)
        peers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    try:
        for peer in peers:
            assert peer.stdout is not None
            assert peer.stdout.readline() == 'met\n'
        yield peers
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()


def test_a_stopped_process_is_seen_and_how_long() -> None:
    now = [100.0]
    with subprocess.Popen(['sleep', '1000']) as process:
        watch = StopWatch(process.pid, lambda: now[0])
        assert watch.stopped_s() == 0.0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        assert watch.stopped_s() == 0.0  # since this look
        now[0] += 4
        assert watch.stopped_s() == 4.0
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert watch.stopped_s() == 0.0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        now[0] += 4
        assert watch.stopped_s() == 0.0  # it starts anew
        process.kill()
    assert not is_stopped(process.pid)


def test_only_tcp_connections_are_guarded() -> None:
    before = guard_connections(10)
    with (
        socket.create_server(('127.0.0.1', 0)) as server,
        socket.create_connection(server.getsockname()) as sock,
        socket.socketpair()[0],
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    ):
        assert guard_connections(10) == before + 2
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_cut_network_ends_all_ranks_in_time_and_a_short_cut_none() -> None:
    """Packets vanish and no connection is closed; rank 1, which only waits, also notices."""
    with computers(3) as hosts, peers_on(hosts) as peers:
        met = time.monotonic()
        hosts[1].cut_off()
        time.sleep(0.5)
        hosts[1].join_again()
        steps = 2 + int((time.monotonic() - met) / STEP_S)  # more than there can be before
        for _ in range(steps):
            for peer in peers:
                assert peer.stdout is not None and peer.stdout.readline() == 'step\n'
        hosts[1].cut_off()
        # gloo's own limit is ten minutes.
        said = [peer.communicate(timeout=under_load(HANG_S + 4.0))[0] for peer in peers]
    assert all('Another rank is gone' in words for words in said)


def test_a_rank_of_a_stopped_client_does_not_go_on(fork_server: ForkClient, tmp_path: Path) -> None:
    """A member that is stopped cannot end its ranks; the fork server does."""
    starter = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}]
from pathlib import Path
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.core.model.events import FragmentProgressed
from tests.support.ranks import order, ranks
from tests.training.loop.test_fragments import train
folder = Path({str(tmp_path)!r})
parent = ForkClient({fork_server.name!r}, {fork_server.log!r})
with ranks(parent, order(folder, total_samples=10_000_000, hang_s=2.0), 1, folder, train) as gang:
    gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
    print(gang.ranks[0].process.pid, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, '-c', starter], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        rank = os.pidfd_open(pid)
        try:
            client.send_signal(signal.SIGSTOP)
            assert select.select([rank], [], [], 60)[0]
        finally:
            os.close(rank)
            client.kill()


def test_a_long_step_is_no_hang(fork_server: ForkClient, tmp_path: Path) -> None:
    """All ranks wait for one that computes for longer than anything may hang."""
    slow = with_faults(train, slow_rank(0, 9.0, step=4))
    all_finish(fork_server, order(tmp_path, total_samples=50, hang_s=6.0), 2, tmp_path, slow)
