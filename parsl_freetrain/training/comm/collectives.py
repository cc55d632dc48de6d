"""How the ranks of a fragment connect, exchange tensors, and notice that one is gone."""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.host.network import address_of, interface_with, is_loopback, own_address
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.comm.device_faults import causes, device_fault
from parsl_freetrain.training.comm.devices import GLOO, backend_for, kind_here, may_share
from parsl_freetrain.training.comm.exchange_watch import exchanges
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import PeerLost, Peers, SealBroken, SealedStore
from parsl_freetrain.training.process import lazy_dynamo, linux
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Rendezvous, ToRank

RENDEZVOUS_TIMEOUT_S = 120.0
# For a peer whose node is silent, which the node agent normally notices sooner; a killed one shows.
EXCHANGE_TIMEOUT = timedelta(minutes=10)
_MARKS = (
    'gloo/transport',
    'Connection closed by peer',
    'Connection reset by peer',
    'Broken pipe',
    'NCCL',
)


class Subgroup(Peers):
    """A process group's ranks, as numbered in it. Only what is defined here exchanges."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # gloo can add up and broadcast tensors on GPUs, but nothing else.
        self.exchanges_on_cpu = dist.get_backend(group) == GLOO

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        sent = row.cpu() if self.exchanges_on_cpu else row
        rows = sent.new_empty(self.world_size, len(sent))
        with as_peer_loss():
            dist.all_gather(list(rows), sent, group=self._group)
        return rows.to(row.device)

    def all_to_all(
        self, row: torch.Tensor, sent: Sequence[int], received: Sequence[int], into: torch.Tensor
    ) -> None:
        with as_peer_loss(), on_cpu(into, self.exchanges_on_cpu) as got:
            own = row.to(got.device)
            dist.all_to_all_single(got, own, list(received), list(sent), group=self._group)

    def all_gather_into_tensor(self, rows: torch.Tensor) -> None:
        """Gloo's all_gather would take as much memory again, and copy all rows."""
        group, mine = self._group, self.rank
        with as_peer_loss(), on_cpu(rows, self.exchanges_on_cpu) as here:
            others = [peer for peer in range(len(here)) if peer != mine]
            ops = [dist.P2POp(dist.irecv, here[i], group=group, group_peer=i) for i in others]
            ops += [dist.P2POp(dist.isend, here[mine], group=group, group_peer=i) for i in others]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        with as_peer_loss():
            for tensor in tensors:
                broadcast_into(tensor, group=self._group, group_src=0)


class RankGroup(Subgroup):
    """The group of all ranks, also torch.distributed's default one, and its store."""

    def __init__(
        self, order: FragmentOrder, place: RankPlace, store: Store, secret: str, gpu: str
    ) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self._texts = SealedStore(store, secret)
        self._open: list[dist.Work] = []
        self._hang_s = order.hang_s
        # Divided models exchange by what gloo has for CPUs only.
        shared = may_share(order.spec.ranks.share_devices) and not order.spec.shapes
        backend, earlier = self._agree_on_backend(gpu, shared), linux.connections()
        self.exchanges_on_cpu = backend == GLOO
        with as_peer_loss(), lazy_dynamo.hidden():
            dist.init_process_group(
                backend,
                store=PrefixStore('group', self._texts if backend == GLOO else store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=EXCHANGE_TIMEOUT,
            )
            self._group = dist.group.WORLD
            if backend == GLOO and self._group is not None:
                world.check_ends = self._texts.check_ends
                world.check_ends(self._group)
        self._connections = linux.connections() - earlier
        linux.guard_connections(order.hang_s)

    def _agree_on_backend(self, gpu: str, shared: bool) -> str:
        with as_peer_loss():
            self._texts.set(f'gpu/{self.rank}', gpu)
        texts, ranks = self._texts, range(self.world_size)

        def chosen() -> str:
            return backend_for([texts.text(f'gpu/{i}') for i in ranks], kind_here(), shared=shared)

        return self.broadcast_object('backend', chosen)

    def broadcast_object(self, key: str, value: Callable[[], str]) -> str:
        with as_peer_loss():
            if self.rank == 0:
                said = value()
                self._texts.set(f'object/{key}', said)
                return said
            return self._texts.text(f'object/{key}')

    def all_reduce_max(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        shared = torch.tensor(numbers, dtype=torch.int64, device='cpu')
        with as_peer_loss():
            work = dist.all_reduce(shared, dist.ReduceOp.MAX, self._group, async_op=True)
        works = [other for other in (*self._open, work) if other is not None]
        self._open = [other for other in works if not other.is_completed()]

        def wait() -> tuple[int, ...]:
            with as_peer_loss():
                if work is not None:
                    work.wait()
                return tuple(map(int, shared.tolist()))

        return wait

    def sendrecv(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        sent = row.cpu() if self.exchanges_on_cpu else row
        got = torch.empty_like(sent)
        with as_peer_loss():
            both, peer = ((dist.isend, sent), (dist.irecv, got)), {'group_peer': partner}
            ops = [dist.P2POp(op, of, group=self._group, **peer) for op, of in both]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return got.to(row.device)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        with as_peer_loss():
            dist.send(tensor, group=self._group, group_dst=to)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        with as_peer_loss():
            dist.recv(tensor, group=self._group, group_src=source)
        return tensor

    def store(self) -> SealedStore | None:
        with as_peer_loss():
            store = self._texts.clone()
        linux.guard_connections(self._hang_s)
        return store

    def barrier(self) -> bool:
        # The process group is not destroyed: models wrapped in DDP would own it last, and wait for
        # gloo's threads with Python's lock held when they are freed, while such a thread may wait
        # for that lock to drop a tensor. The kernel closes the connections when the process exits.
        try:
            # Answers that nobody waited for; NCCL's barrier would not wait for them either.
            for work in self._open:
                work.wait()
            dist.barrier(self._group)
        except RuntimeError:
            return False
        return True

    def abort(self) -> None:
        # Otherwise a rank that waits for this one would wait until this process ends.
        linux.end_connections(self._connections)

    def broken(self) -> bool:
        return not self._connections <= linux.connections()


@contextmanager
def on_cpu(tensor: torch.Tensor, wanted: bool) -> Iterator[torch.Tensor]:
    """Where ``wanted``, a copy on the CPU, copied back in the end; else the tensor itself."""
    here = tensor.cpu() if wanted else tensor
    yield here
    if here is not tensor:
        tensor.copy_(here)


def broadcast_into(tensor: torch.Tensor, **source: Any) -> None:
    """For any memory layout: gloo sends the tensor's bytes from its start, NCCL refuses others."""
    dense = tensor.contiguous()
    dist.broadcast(dense, **source)
    if dense is not tensor:
        tensor.copy_(dense)


def join(
    order: FragmentOrder, place: RankPlace, channel: Channel[ToRank], inbox: Inbox, gpu: str
) -> Callable[[], Peers]:
    """Begin to connect, and return what waits for it; rank 0 sends its store's address."""
    if place.world_size == 1:
        return Peers
    host, interface = _listens_at(order, place)
    if interface is not None:
        os.environ['GLOO_SOCKET_IFNAME'] = interface
        if order.interface or place.nodes == 1:
            # A site's modules may have set it, to several interfaces or a prefix.
            os.environ.setdefault('NCCL_SOCKET_IFNAME', interface)
    open_store = partial(TCPStore, timeout=EXCHANGE_TIMEOUT, wait_for_workers=False)
    if place.rank > 0:

        def come() -> Peers:
            where = inbox.wait_for_rendezvous(RENDEZVOUS_TIMEOUT_S)
            if is_loopback(where.host) and not is_loopback(host):
                raise FreeTrainError(
                    f'Rank 0 gives {where.host} as its address, which other nodes cannot reach: '
                    "name the network of the nodes by the site's interface=."
                )
            with as_peer_loss():
                store = open_store(where.host, where.port, place.world_size, False)
            return RankGroup(order, place, store, where.secret, gpu)

        return come
    # Listen at this address only; by itself, the store would listen at all addresses of the host.
    listener = socket.create_server((host, 0), backlog=max(128, place.world_size))
    port = int(listener.getsockname()[1])
    store = open_store(host, port, place.world_size, True, master_listen_fd=listener.detach())
    secret = secrets.token_hex(32)
    channel.send(Rendezvous(host, port, secret))
    return lambda: RankGroup(order, place, store, secret, gpu)


def _listens_at(order: FragmentOrder, place: RankPlace) -> tuple[str, str | None]:
    """The address and the interface by which the other ranks reach this one."""
    if order.interface is not None or place.nodes == 1:
        interface = order.interface or 'lo'
        return address_of(interface), interface
    # The name of a node is often an address of its own loopback interface.
    seen = place.address if place.address and not is_loopback(place.address) else own_address()
    return seen, interface_with(seen)


def is_peer_loss(error: BaseException) -> bool:
    """Whether a cause is that a rank is gone; torch's RuntimeErrors are told by their texts."""
    lost = (PeerLost, SealBroken, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    return any(
        isinstance(cause, lost)
        or (isinstance(cause, RuntimeError) and any(mark in str(cause) for mark in _MARKS))
        for cause in causes(error)
    )


@contextmanager
def as_peer_loss() -> Iterator[None]:
    """Raise torch's errors of an exchange as :class:`PeerLost`."""
    caller = sys._getframe(2).f_code.co_qualname.removeprefix('RankGroup.')
    try:
        with exchanges.exchange(caller.removeprefix('Subgroup.')):
            yield
    except RuntimeError as error:
        if device_fault(error) or not is_peer_loss(error):
            raise
        raise PeerLost(f'Another rank is gone: {error}') from error
