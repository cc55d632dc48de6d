"""What holds for every way by which the files of a state come to the next fragment."""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint.block_digests import FileImage
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.transport import Disk, Files, Transport
from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory, image_of
from parsl_freetrain.training.checkpoint.transport_peers import PeerTransport
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.process.channel import address_of
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.process.standby_slots import FORK_SERVER_VARIABLE
from tests.support.waiting import LIMIT_S

BLOCK = 100
CONTENT = bytes(range(250))


class Thread(Peers):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, ways: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank, self._ways = rank, ways
        self.world_size = max(max(pair) for pair in ways) + 1

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._ways[self.rank, to].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor.copy_(self._ways[source, self.rank].get(timeout=LIMIT_S))

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            self.send(row, rank)
        rows = {rank: self.recv(torch.empty_like(row), rank) for rank in others}
        return torch.stack([rows.get(rank, row) for rank in range(self.world_size)])


def together(count: int, do: Callable[[Thread], Any]) -> list[Any]:
    """What ranks return that do the same at the same time."""
    ways = {(a, b): queue.Queue[torch.Tensor]() for a in range(count) for b in range(count)}
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(do, [Thread(rank, ways) for rank in range(count)]))


class OverPeers:
    """Two ranks: the first one puts, the second one has the memory, and the first one fetches."""

    def __init__(self, trainer: str, files: Files) -> None:
        self._trainer, self._files = trainer, files

    def put(self, file: str, image: FileImage) -> bool:
        def put(peers: Thread) -> bool:
            ways = PeerTransport(peers, NodeMemory(self._trainer), heirs={0: 1})
            return ways.put(file, image if peers.rank == 0 else None)

        return bool(together(2, put)[0])

    def _do(self, then: Callable[[PeerTransport, int], Any]) -> Any:
        def do(peers: Thread) -> Any:
            there = self._trainer if peers.rank else 'nobody'
            memory = NodeMemory(there, self._files)
            return then(PeerTransport(peers, memory, None, self._files), peers.rank)

        return together(2, do)[0]

    def has(self, file: str) -> bool:
        return bool(self._do(lambda ways, _: ways.has(file)))

    def fetch(self, blocks: Sequence[tuple[str, int]]) -> Iterator[memoryview]:
        yield from self._do(lambda ways, rank: list(ways.fetch(() if rank else blocks)))


@pytest.fixture(params=['disk', 'memory', 'peers'])
def make(
    request: pytest.FixtureRequest,
    fork_server: ForkClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Files], Transport]:
    monkeypatch.setattr(hashing, 'BLOCK', BLOCK)
    monkeypatch.setenv(FORK_SERVER_VARIABLE, address_of(fork_server.name)[1:].decode())
    made: dict[str, Callable[[Files], Transport]] = {
        'disk': lambda files: Disk(tmp_path, files),
        'memory': lambda files: NodeMemory(tmp_path.name, files),
        'peers': lambda files: OverPeers(tmp_path.name, files),
    }
    return made[request.param]


@pytest.fixture
def image() -> Iterator[FileImage]:
    made = image_of(CONTENT)
    assert made.fd is not None
    yield made
    os.close(made.fd)


def files_of(image: FileImage) -> Mapping[str, tuple[int, tuple[str, ...]]]:
    return {'rank-0.safetensors': (len(image.content), image.blocks)}


def test_what_was_put_others_get(make: Callable[[Files], Transport], image: FileImage) -> None:
    files = files_of(image)
    (name,) = files
    assert len(files[name][1]) == 3
    assert not make(files).has(name)
    with pytest.raises(Damaged, match=r'rank-0\.safetensors'):
        list(make(files).fetch([(name, 0)]))
    assert make(files).put(name, image)
    ways = make(files)
    assert ways.has(name)
    found = [bytes(block) for block in ways.fetch([(name, 0), (name, 2)])]
    assert found == [CONTENT[:BLOCK], CONTENT[2 * BLOCK :]]


def test_what_changed_since_is_damage(make: Callable[[Files], Transport], image: FileImage) -> None:
    files = files_of(image)
    (name,) = files
    wrong = image_of(CONTENT[:-1] + b'x')
    wrong._blocks = image.blocks
    if isinstance(ways := make(files), OverPeers):  # which looks at what arrives
        assert not ways.put(name, wrong)
        NodeMemory(ways._trainer, files).put(name, wrong)
    else:
        assert ways.put(name, wrong)
    os.close(wrong.fd or 0)
    ways = make(files)
    assert bytes(next(iter(ways.fetch([(name, 0)])))) == CONTENT[:BLOCK]
    with pytest.raises(Damaged, match=r'block 2 of rank-0\.safetensors'):
        list(ways.fetch([(name, 0), (name, 2)]))


def test_one_rank_of_a_node_reads_for_all_and_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: FileImage
) -> None:
    monkeypatch.setattr(hashing, 'BLOCK', BLOCK)
    monkeypatch.delenv(FORK_SERVER_VARIABLE, raising=False)
    files = files_of(image)
    (name,) = files
    Disk(tmp_path).put(name, image)
    gate = threading.Barrier(7)

    def fetch(peers: Thread) -> tuple[int, int, bytes]:
        disk = Disk(tmp_path, files)
        ways = PeerTransport(peers, NodeMemory('none', files), disk, files, per_node=4)
        gate.wait(LIMIT_S)
        got = b''.join(ways.fetch([(name, number) for number in range(3)]))
        return disk.bytes_read, ways.bytes_from_others, got

    found = together(7, fetch)  # two nodes, the second one with three ranks
    assert {got for _, _, got in found} == {CONTENT}
    read = [read for read, _, _ in found]
    assert [bool(bytes_read) for bytes_read in read] == [True, *[False] * 3, True, *[False] * 2]
    assert {bytes_read + others for bytes_read, others, _ in found} == {len(CONTENT)}


def test_damage_on_the_disk_is_found_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: FileImage
) -> None:
    monkeypatch.setattr(hashing, 'BLOCK', BLOCK)
    monkeypatch.delenv(FORK_SERVER_VARIABLE, raising=False)
    files = files_of(image)
    (name,) = files
    (tmp_path / name).write_bytes(CONTENT[:-1] + b'x')

    def fetch(peers: Thread) -> str:
        disk = Disk(tmp_path, files)
        ways = PeerTransport(peers, NodeMemory('none', files), disk, files, per_node=3)
        with pytest.raises(Damaged) as raised:
            list(ways.fetch([(name, number) for number in range(3)]))
        return str(raised.value)

    assert set(together(3, fetch)) == {
        'block 2 of rank-0.safetensors does not have the digest that was committed'
    }
