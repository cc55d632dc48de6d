"""The other ranks of a fragment: meeting them, exchanging with them, noticing that one is gone."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace
from parsl_freetrain.training.gpus import GLOO, backend_for
from parsl_freetrain.training.inbox import Inbox
from parsl_freetrain.training.liveness import guard_connections

RENDEZVOUS_TIMEOUT_S = 120.0
# A peer that was killed is noticed at once; this is for one whose node is silent, which the member normally learns sooner.
EXCHANGE_TIMEOUT = timedelta(minutes=10)
_SIOCGIFADDR = 0x8915
_MARKS = ('gloo/transport', 'Connection closed by peer', 'Connection reset by peer', 'Broken pipe', 'NCCL')


class PeerLost(FreeTrainError):
    """Another rank of the fragment is gone, so that this one cannot go on."""


class Peers(Protocol):
    """All ranks of a fragment, this one included. All of them must call the same things in the same order."""

    rank: int
    world_size: int

    def tell(self, what: str, value: Callable[[], str]) -> str:
        """What rank 0 has to say on a matter; ``value`` is called there only."""
        ...

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's row, by rank; rows are flat tensors of one length and type."""
        ...

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors by those of rank 0."""
        ...

    def largest(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        """Start to find the largest of everybody's first numbers, of the second ones, and so on; what is returned waits for it."""
        ...

    def swap(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        """Give a row to another rank that does the same, and get its row; both are flat, of one length and type."""
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to another rank, which receives one of the same size and type; only these two call anything."""
        ...

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite a tensor by what another rank sends, and return it."""
        ...

    def leave(self) -> bool:
        """Wait until all ranks are here and end it; False if not all of them came."""
        ...


class Alone:
    """A fragment of one rank: no process group."""

    rank = 0
    world_size = 1

    def tell(self, what: str, value: Callable[[], str]) -> str:
        return value()

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def largest(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        return lambda: tuple(numbers)

    def swap(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        raise ValueError('There is no other rank.')

    def send(self, tensor: torch.Tensor, to: int) -> None:
        raise ValueError('There is no other rank.')

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        raise ValueError('There is no other rank.')

    def leave(self) -> bool:
        if dist.is_initialized():  # for a mesh of one rank
            dist.destroy_process_group()
        return True


class Gang:
    """The default process group of torch.distributed, and the store that it was made by."""

    def __init__(self, order: FragmentOrder, place: RankPlace, store: Store, gpu: str) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self._store = store
        self._open: list[dist.Work] = []
        backend = self._agree_on_backend(gpu)
        self._gathers_on_cpu = backend == GLOO   # which adds up and broadcasts what is on GPUs, and does nothing else with it
        with _as_peer_loss():
            dist.init_process_group(backend, store=PrefixStore('group', store), rank=place.rank, world_size=place.world_size,
                                    timeout=EXCHANGE_TIMEOUT)
        guard_connections(order.hang_s)

    def _agree_on_backend(self, gpu: str) -> str:
        with _as_peer_loss():
            self._store.set(f'gpu/{self.rank}', gpu)
        return self.tell('backend', lambda: backend_for(
            [bytes(self._store.get(f'gpu/{rank}')).decode() for rank in range(self.world_size)], nccl=dist.is_nccl_available()))

    def tell(self, what: str, value: Callable[[], str]) -> str:
        with _as_peer_loss():
            if self.rank == 0:
                said = value()
                self._store.set(f'told/{what}', said)
                return said
            return bytes(self._store.get(f'told/{what}')).decode()

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        sent = row.cpu() if self._gathers_on_cpu else row
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        with _as_peer_loss():
            dist.all_gather(rows, sent)
        return [other.to(row.device) for other in rows]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        with _as_peer_loss():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def largest(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        shared = torch.tensor(numbers, dtype=torch.int64, device='cpu')
        with _as_peer_loss():
            work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, async_op=True)
        self._open = [other for other in (*self._open, work) if other is not None and not other.is_completed()]

        def wait() -> tuple[int, ...]:
            with _as_peer_loss():
                if work is not None:
                    work.wait()
                return tuple(map(int, shared.tolist()))
        return wait

    def swap(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        sent = row.cpu() if self._gathers_on_cpu else row
        got = torch.empty_like(sent)
        with _as_peer_loss():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, got, partner)]):
                work.wait()
        return got.to(row.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with _as_peer_loss():
            dist.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        with _as_peer_loss():
            dist.recv(tensor, source)
        return tensor

    def leave(self) -> bool:
        try:
            for work in self._open:   # an answer that nobody waited for; NCCL's barrier would not either
                work.wait()
            dist.barrier()
        except RuntimeError:
            return False
        with suppress(RuntimeError):  # a peer may be faster, and nothing is exchanged any more
            dist.destroy_process_group()
        return True


def join(order: FragmentOrder, place: RankPlace, channel: Channel, inbox: Inbox, gpu: str) -> Callable[[], Peers]:
    """Begin to meet the other ranks; what is returned waits for them.

    Rank 0 opens the meeting point and tells the member where it is; the others wait to be told. ``gpu`` is this rank's, as
    :func:`~parsl_freetrain.training.gpus.name_of` has it.
    """
    if place.world_size == 1:
        return Alone
    interface = order.interface or ('lo' if place.nodes == 1 else None)
    if interface is not None:
        os.environ['GLOO_SOCKET_IFNAME'] = os.environ['NCCL_SOCKET_IFNAME'] = interface
    if place.rank > 0:
        def come() -> Peers:
            where = inbox.wait_for('rendezvous', RENDEZVOUS_TIMEOUT_S)
            with _as_peer_loss():
                store = TCPStore(str(where['host']), int(where['port']), place.world_size, False, timeout=EXCHANGE_TIMEOUT)
            return Gang(order, place, store, gpu)
        return come
    host = _address(interface)
    # Listens at that one address; left to itself, the store would listen at all of the host's.
    listener = socket.create_server((host, 0), backlog=max(128, place.world_size))
    port = int(listener.getsockname()[1])
    store = TCPStore(host, port, place.world_size, True, timeout=EXCHANGE_TIMEOUT, wait_for_workers=False,
                          master_listen_fd=listener.detach())
    channel.send({'kind': 'rendezvous', 'host': host, 'port': port})
    return lambda: Gang(order, place, store, gpu)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception, or what it came from, means that another rank is gone.

    torch.distributed tells most of it as plain RuntimeErrors, which are known by their texts.
    """
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (PeerLost, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS):
            return True
        error = error.__cause__ or error.__context__ or error
    return False


@contextmanager
def _as_peer_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f'Another rank is gone: {error}') from error


def _address(interface: str | None) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        if interface is not None:
            request = struct.pack('256s', interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
        try:
            # Connecting a datagram socket sends nothing; it shows by which address this host is seen outside.
            sock.connect(('192.0.2.1', 9))
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
