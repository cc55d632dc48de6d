"""From rank to rank: a node's memory, or what one rank of it reads, goes to those that need it."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from parsl_freetrain.training.checkpoint.block_digests import FileImage, digest_of_blocks, threads
from parsl_freetrain.training.checkpoint.manifest import Damaged, File, SharedDamaged
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.transport import Disk, FileBlock, Files, is_right, size_of
from parsl_freetrain.training.checkpoint.transport_memory import NodeMemory, memory_file
from parsl_freetrain.training.comm.peers import Peers

log = logging.getLogger(__name__)


class PeerTransport:
    """The ranks that ``put`` and ``fetch`` together. ``heirs``: by rank, the one whose node keeps
    its file; ``taken``: others' digests kept here.
    """

    def __init__(
        self,
        peers: Peers,
        memory: NodeMemory,
        disk: Disk | None = None,
        files: Files | None = None,
        per_node: int = 1,
        heirs: Mapping[int, int] | None = None,
    ) -> None:
        self._peers, self._memory, self._disk = peers, memory, disk
        self._files = files or {}
        self._per_node, self._heirs = per_node, heirs or {}
        self.bytes_here = self.bytes_from_others = 0
        self.taken: dict[str, str] = {}
        self._damage: Damaged | None = None
        self._holders: dict[str, list[int]] = {}
        if self._files:
            row = torch.tensor([memory.has(name) for name in self._files], dtype=torch.uint8)
            held = peers.all_gather(row)
            holders = (held[:, i].nonzero().flatten().tolist() for i in range(len(self._files)))
            self._holders = dict(zip(self._files, holders, strict=True))

    def put(self, file: str, image: FileImage | None) -> bool:
        """Keep each rank's file (None: it has none) on its heir's node; whether this is kept."""
        kept = False
        for source, heir in sorted(self._heirs.items()):
            if self._peers.rank == source == heir:
                kept = image is not None and self._memory.put(file, image)
            elif self._peers.rank == source:
                kept = self._send_file(file, image, heir)
            elif self._peers.rank == heir:
                self._take_file(source)
        return kept

    def has(self, file: str) -> bool:
        return (self._disk is not None and self._disk.has(file)) or bool(self._holders.get(file))

    def fetch(self, blocks: Sequence[FileBlock]) -> Iterator[memoryview]:
        needed, rank, self._damage = set(blocks), self._peers.rank, None
        with threads() as pool:
            right = {
                block: pool.submit(is_right, block, content, self._files)
                for block in blocks
                if (content := self._memory.get(block)) is not None
            }
            for block, sendings in self._plan(needed):
                content, read = self._memory.get(block), False
                for ranks in sendings:
                    if rank in ranks:
                        if rank == ranks[0] and content is None:
                            content, read = self._read(block), True
                        content = self._spread(block, ranks, content)
                if block not in needed:
                    continue
                if block in right:
                    read = right[block].result()
                    self.bytes_here += size_of(block, self._files)
                if content is None or not (read or is_right(block, content, self._files)):
                    content = self._read(block)
                yield content
        if self._damage is not None:
            raise self._damage

    def _plan(self, needed: set[FileBlock]) -> Iterator[tuple[FileBlock, list[list[int]]]]:
        """All blocks needed, in order, with groups of ranks whose first one has or reads it."""
        blocks = ((name, len(digests)) for name, (_, digests) in self._files.items())
        every = [(name, number) for name, count in blocks for number in range(count)]
        if not every:
            return
        row = torch.tensor([block in needed for block in every], dtype=torch.uint8)
        wanted = self._peers.all_gather(row)
        for i, block in enumerate(every):
            ranks = wanted[:, i].nonzero().flatten().tolist()
            groups: dict[int, list[int]] = {}
            if holders := self._holders[block[0]]:
                sender = holders[block[1] % len(holders)]
                groups[0] = [sender, *(one for one in ranks if one not in holders)]
            else:
                for one in ranks:
                    groups.setdefault(one // self._per_node, []).append(one)
            yield block, [group for group in groups.values() if len(group) > 1]

    def _read(self, block: FileBlock) -> memoryview:
        """A block from disk; damage is raised at the end, since others need this rank."""
        try:
            if self._disk is None:
                raise Damaged(f'block {block[1]} of {block[0]} is not in memory as it was left')
            return self._disk.get(block)
        except Damaged as error:
            if self._damage is None or isinstance(self._damage, SharedDamaged):
                self._damage = error
            return self._room(block)

    def _room(self, block: FileBlock) -> memoryview:
        return bytes_of(torch.zeros(size_of(block, self._files), dtype=torch.uint8))

    def _spread(
        self, block: FileBlock, ranks: Sequence[int], content: memoryview | None
    ) -> memoryview | None:
        """Send a block along a tree, from the first of the ranks to all of them."""
        rank = self._peers.rank
        while len(ranks) > 1:
            middle = (len(ranks) + 1) // 2
            near, far = ranks[:middle], ranks[middle:]
            if rank == ranks[0] and content is not None:
                self._send(content, far[0])
            elif rank == far[0]:
                content = self._recv(self._room(block), ranks[0])
                self.bytes_from_others += len(content)
            ranks = near if rank in near else far
        return content

    def _send_file(self, file: str, image: FileImage | None, to: int) -> bool:
        if image is None:
            self._say(to, 0)
            return False
        about = msgspec.msgpack.encode(File(file, len(image.content), image.blocks))
        self._say(to, len(about))
        self._send(memoryview(bytearray(about)), to)
        if not self._hear(to):
            return False
        self._send(image.content, to)
        return bool(self._hear(to))

    def _take_file(self, source: int) -> None:
        length = self._hear(source)
        if not length:
            return
        file = msgspec.msgpack.decode(self._recv(memoryview(bytearray(length)), source), type=File)
        try:
            fd, content = memory_file(file.bytes)
        except OSError:
            log.warning('There is no memory for a state of %d bytes', file.bytes, exc_info=True)
            self._say(source, 0)
            return
        try:
            self._say(source, 1)
            image = FileImage(self._recv(content, source), fd)
            kept = image.blocks == file.blocks and self._memory.put(file.name, image)
            if kept:
                self.taken[file.name] = digest_of_blocks(file.blocks)
            self._say(source, kept)
        finally:
            os.close(fd)

    def _send(self, content: memoryview, to: int) -> None:
        self._peers.send(torch.frombuffer(content, dtype=torch.uint8), to)

    def _recv(self, into: memoryview, source: int) -> memoryview:
        self._peers.recv(torch.frombuffer(into, dtype=torch.uint8), source)
        return into

    def _say(self, to: int, number: int) -> None:
        self._peers.send(torch.tensor([number], dtype=torch.int64), to)

    def _hear(self, source: int) -> int:
        return int(self._peers.recv(torch.zeros(1, dtype=torch.int64), source))
