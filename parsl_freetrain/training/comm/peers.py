"""What a rank asks of the others, in torch.distributed's words, and the answers of one alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.comm.sealed_store import SealedStore

_HEAD = 8


class PeerLost(FreeTrainError):
    """Another rank of the fragment is gone, so this one cannot continue."""


class Peers:
    """All ranks of a fragment, which make the same calls in the same order; here one, without a
    process group. ``exchanges_on_cpu``: tensors of devices are copied for each exchange.
    """

    rank = 0
    world_size = 1
    exchanges_on_cpu = True

    def broadcast_object(self, key: str, value: Callable[[], str]) -> str:
        """The text that rank 0 gives to all ranks under a key; only there, ``value`` is called."""
        return value()

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """The flat rows of all ranks, of equal length and type, as one tensor (ranks, length)."""
        return row[None]

    def all_to_all(
        self, row: torch.Tensor, sent: Sequence[int], received: Sequence[int], into: torch.Tensor
    ) -> None:
        """Send each rank its part of a flat tensor, and write the parts that come into another one,
        in order of rank. ``sent``, ``received``: the number of elements by rank.
        """
        into.copy_(row)

    def all_gather_into_tensor(self, rows: torch.Tensor) -> None:
        """Fill in the others' rows of a tensor (ranks, length) that has each rank's own."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""

    def all_reduce_max(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        """Begin to find the maximum of each number. Returns a function that waits for it."""
        return lambda: tuple(numbers)

    def sendrecv(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        """Exchange flat rows of equal length and type with a rank that calls this too."""
        raise ValueError('There is no other rank.')

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To a rank that calls :meth:`recv` with the same size and type; others call nothing."""
        raise ValueError('There is no other rank.')

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite a tensor, and return it."""
        raise ValueError('There is no other rank.')

    def store(self) -> SealedStore | None:
        """Another connection to the store, for another thread; None for a single rank."""
        return None

    def barrier(self) -> bool:
        """Wait for all ranks before the process ends; False if one is gone."""
        return True

    def abort(self) -> None:
        """Have the others notice at once that this rank does not go on, whatever it still does."""

    def broken(self) -> bool:
        """Whether a connection to another rank has ended."""
        return False


def on_any_rank(peers: Peers, flag: bool) -> bool:
    return bool(peers.all_reduce_max((flag,))()[0])


def gather_bytes(peers: Peers, own: bytes, most: int | None = None) -> list[bytes]:
    """What each rank gave, by rank. All call this. ``most`` bytes, if known, saves an exchange."""
    if peers.world_size == 1:
        return [own]
    (longest,) = (most,) if most is not None else peers.all_reduce_max((len(own),))()
    if not longest:
        return [b''] * peers.world_size
    data = len(own).to_bytes(_HEAD, 'little') + own
    row = torch.zeros(_HEAD + longest, dtype=torch.uint8, device='cpu')
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [bytes(other.numpy()) for other in peers.all_gather(row)]
    return [said[_HEAD : _HEAD + int.from_bytes(said[:_HEAD], 'little')] for said in rows]
