"""What a rank asks of the others, in torch.distributed's words, and the answers of one alone."""

import hmac
import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from time import monotonic
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from parsl_freetrain.core.model.errors import FreeTrainError

_DIGEST = 'sha256'
_CODE_LENGTH = 32


class SealBroken(FreeTrainError):
    """A text in the store is not from a rank of this fragment."""


class SealedStore(Store):
    """The store of the ranks, with a secret: another program's addresses would lead gloo there."""

    def __init__(self, store: Any, secret: str) -> None:
        super().__init__()
        self._store, self._secret = store, secret

    def clone(self) -> 'SealedStore':
        return SealedStore(self._store.clone(), self._secret)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], *timeout: object) -> None:
        self._store.wait(keys, *timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._code(key, data) + data)

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises SealBroken if no rank of this fragment has set it."""
        found = bytes(self._store.get(key))
        code, data = found[:_CODE_LENGTH], found[_CODE_LENGTH:]
        if not hmac.compare_digest(code, self._code(key, data)):
            raise SealBroken(
                f'The value of {key!r} in the store of the ranks was not written by a rank of this '
                'fragment: another program has written to its port. Nothing of it is used.'
            )
        return data

    def text(self, key: str) -> str:
        return self.get(key).decode()

    def check_ends(self, group: dist.ProcessGroup) -> None:
        """Raise SealBroken unless ranks are at the ends: gloo takes whoever connects."""
        ranks, name = dist.get_process_group_ranks(group), group.group_name
        me = ranks[dist.get_rank(group)]
        codes = [self._code(f'{name} {me} {to}', b'') for to in ranks]
        sent = torch.frombuffer(bytearray(b''.join(codes)), dtype=torch.uint8)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        if bytes(got.numpy()) != b''.join(self._code(f'{name} {of} {me}', b'') for of in ranks):
            raise SealBroken(
                'Another program has taken the place of a rank of this fragment: it has connected '
                'to the port of this one. Nothing of what it sends is used.'
            )

    def _code(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret.encode(), key.encode() + b'\0' + data, _DIGEST)


_HEAD = 8


class PeerLost(FreeTrainError):
    """Another rank of the fragment is gone, so this one cannot continue."""


class Peers:
    """A fragment's ranks, with the same calls in the same order; here one alone."""

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
        """Send each rank its part of a flat tensor; numbers of elements by rank."""
        into.copy_(row)

    def all_gather_into_tensor(self, rows: torch.Tensor) -> None:
        """Fill in the others' rows of a tensor (ranks, length) that has each rank's own."""

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with those of rank 0."""

    def all_reduce_max(self, numbers: Sequence[int]) -> Callable[[], tuple[int, ...]]:
        """Begin to find the maximum of each number. Returns a function that waits for it."""
        return lambda: tuple(numbers)

    def sendrecv(self, row: torch.Tensor, partner: int) -> torch.Tensor:
        raise ValueError('There is no other rank.')

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To a rank that calls :meth:`recv` with the same size and type; others call nothing."""
        raise ValueError('There is no other rank.')

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
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


def gather(peers: Peers, own: Any, kind: Any = Any, most: int | None = None) -> list[Any]:
    """As :func:`gather_bytes`, of values of a ``kind`` that msgpack knows."""
    said = gather_bytes(peers, msgspec.msgpack.encode(own), most)
    return [msgspec.msgpack.decode(one, type=kind) for one in said]


EVERY_S = 0.25
_CAREFUL = 40


class Agreed(IntEnum):
    """What is done after a step. Each takes precedence over those before it."""

    GO_ON = 0
    REPORT = 1
    SAVE = 2
    STOP = 3
    FINISH = 4
    SPOILT = 5  # the state has numbers that are not finite
    DIFFERENT = 6  # the ranks do not do the same


def steps_between(step_s: float, time_left_s: float = math.inf) -> int:
    """Steps to the next agreement: what fits into :data:`EVERY_S`, fewer towards the end."""
    every_s = min(EVERY_S, max(time_left_s, 0.0) / _CAREFUL)
    return max(1, int(every_s / step_s)) if step_s > 0 else 1


class Agreement:
    """The maximum of all ranks' wishes: asked after one step, read after the next. ``same``: a
    number without which they are :attr:`Agreed.DIFFERENT`. All call it equally often.
    """

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float] = monotonic,
        same: Callable[[], int] = lambda: 0,
    ) -> None:
        self._peers, self._clock, self._same = peers, clock, same
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self._between = 1
        self._steps = 0
        self._since = clock()

    @property
    def delay(self) -> int:
        """Maximum number of steps from a wish to the decision."""
        return 0 if self._peers.world_size == 1 else self._between + 1

    def after_step(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """The decision due now; ``wish`` and ``time_left`` are called when an agreement begins."""
        if self._peers.world_size == 1:
            return wish()
        self._steps += 1
        if self._answer is not None:
            decision, fewest, largest, smallest = self._answer()
            self._answer = None
            self._between = -fewest
            return decision if largest == -smallest else Agreed.DIFFERENT
        if self._steps >= self._between:
            now = self._clock()
            between = steps_between((now - self._since) / self._steps, time_left())
            same = self._same()
            self._answer = self._peers.all_reduce_max((wish(), -between, same, -same))
            self._steps, self._since = 0, now
        return Agreed.GO_ON
