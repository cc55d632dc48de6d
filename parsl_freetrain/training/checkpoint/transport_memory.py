"""The memory of a node: copies of states, and the files its fork server keeps of them."""

import logging
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import torch

from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint.block_digests import FileImage, digest_of_blocks
from parsl_freetrain.training.checkpoint.manifest import Damaged
from parsl_freetrain.training.checkpoint.parts import placed
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.transport import FileBlock, Files, is_right
from parsl_freetrain.training.process.channel import Channel, is_ours
from parsl_freetrain.training.process.standby_slots import FORK_SERVER_VARIABLE
from parsl_freetrain.training.spec import fork_messages as fork
from parsl_freetrain.training.spec.messages import Decoder

log = logging.getLogger(__name__)

_ANSWER_S = 10.0


class NodeMemory:
    """The ``files`` a fork server keeps for a trainer; ``offer``: see :meth:`wants`."""

    def __init__(
        self, trainer: str, files: Files | None = None, offer: fork.OfferState | None = None
    ) -> None:
        self._trainer, self._files, self._offer = trainer, files or {}, offer
        self._mapped: dict[str, memoryview | None] = {}

    def put(self, file: str, image: FileImage) -> bool:
        if image.fd is None:
            return False
        request = fork.KeepState(self._trainer, digest_of_blocks(image.blocks), self._offer, file)
        try:
            return _answers(request, fork.StateKept, image.fd)
        except (OSError, EOFError):  # the next fragment reads the checkpoint
            log.warning('%s could not be left in memory', file, exc_info=True)
            return False

    def has(self, file: str) -> bool:
        if file not in self._mapped:
            size, blocks = self._files[file]
            self._mapped[file] = self.map(digest_of_blocks(blocks), size)
        return self._mapped[file] is not None

    def fetch(self, blocks: Sequence[FileBlock]) -> Iterator[memoryview]:
        for block in blocks:
            content = self.get(block)
            if content is None or not is_right(block, content, self._files):
                raise Damaged(f'block {block[1]} of {block[0]} is not in memory')
            yield content

    def get(self, block: FileBlock) -> memoryview | None:
        """The bytes of a block, not verified; None: the file is not here."""
        content = self._mapped[block[0]] if self.has(block[0]) else None
        start = block[1] * hashing.BLOCK
        return None if content is None else content[start : start + hashing.BLOCK]

    def map(self, digest: str, size: int | None = None) -> memoryview | None:
        """The bytes of a file; None: the file with this digest is not here."""
        try:
            fd = self._fetch_fd(digest, keep=True)
            if fd is None:
                return None
            with os.fdopen(fd):
                # Changes stay in this process.
                length = os.fstat(fd).st_size if size is None else size
                mapped = mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE)
                return bytes_of(torch.frombuffer(mapped, dtype=torch.uint8))
        except (OSError, EOFError, ValueError) as error:
            print(f'Nothing could be had from the memory of this node: {error}')
            return None

    def forget(self) -> None:
        for file, content in self._mapped.items():
            if content is not None:
                fd = self._fetch_fd(digest_of_blocks(self._files[file][1]), keep=False)
                if fd is not None:
                    os.close(fd)
        self._mapped.clear()

    def _fetch_fd(self, digest: str, *, keep: bool) -> int | None:
        with closing(_fork_server()) as channel:
            request = fork.FetchState(self._trainer, digest, keep)
            if not channel.send(request) or not channel.poll(_ANSWER_S):
                return None
            return channel.recv_fd()[1]


def is_wanted(offer: fork.OfferState) -> bool:
    """Whether this node's fork server wants a state; no other rank here has offered as much."""
    with suppress(EOFError):
        return _answers(offer, fork.StateWanted)
    return False


def _answers(request: fork.ForkRequest, kind: type, fd: int | None = None) -> bool:
    """Whether the fork server gives this answer; ``fd`` goes with the request."""
    with closing(_fork_server()) as channel:
        if not channel.send(request):
            return False
        if fd is not None:
            channel.send_fd(fd)
        return channel.poll(_ANSWER_S) and isinstance(channel.recv(), kind)


def image_of(content: bytes) -> FileImage:
    """A file in memory with these bytes. Its owner closes ``fd``."""
    fd, mapped = memory_file(len(content))
    mapped[:] = content
    return FileImage(mapped, fd)


def memory_file(size: int) -> tuple[int, memoryview]:
    """A new file in memory (the caller closes it), and its bytes; OSError: too little memory."""
    fd = os.memfd_create('freetrain-state', os.MFD_CLOEXEC)
    try:
        # Without this, a lack of memory would end the process when it writes.
        os.posix_fallocate(fd, 0, size)
        return fd, bytes_of(torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8))
    except BaseException:
        os.close(fd)
        raise


def lock_pages(memory: torch.Tensor) -> Callable[[], object] | None:
    """Page-lock memory, which CUDA then copies faster; what ends that, or None if it is refused."""
    cudart, codes = torch.cuda.cudart(), list[int]()
    given = memory.data_ptr(), memory.nbytes, 0
    # CUDA keeps a refusal for its thread, whose next launch would raise it.
    thread = threading.Thread(target=lambda: codes.append(int(cudart.cudaHostRegister(*given))))
    thread.start()
    thread.join()
    return partial(cudart.cudaHostUnregister, memory.data_ptr()) if codes == [0] else None


def _fork_server() -> Channel[fork.ForkAnswer]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(b'\0' + os.environ.get(FORK_SERVER_VARIABLE, '').encode())
        if not is_ours(sock):
            raise PermissionError('another user listens where the fork server should')
    except OSError:
        sock.close()
        raise
    return Channel(sock, Decoder(fork.ForkAnswer, 'the fork server'))


class Snapshots:
    """Copies states, one at a time, into one piece of memory (page-locked, or a file in memory for
    other processes), enqueued before what comes next on the same stream.
    """

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._fd: int | None = None
        self._ends: list[Callable[[], object]] = []
        self._locked = False

    def reserve(self, state: State) -> None:
        """Make the memory for copies of a state, which takes long if it is page-locked."""
        size = placed(state.tensors, state.boxes)[0].nbytes
        locked = bool(_devices(state))
        if self._arena.numel() < size or self._locked != locked:
            self._replace_arena(size, locked=locked)

    def take(self, state: State) -> State:
        """A copy of a state on the CPU; complete once its image's content has been asked for."""
        self.reserve(state)
        layout, places = placed(state.tensors, state.boxes)
        size = layout.nbytes
        header = bytearray(layout.header)
        self._arena[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        copies = {}
        for name, tensor in state.tensors.items():
            start, length = places[name]
            copy = self._arena[start : start + length].view(tensor.dtype).view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        copied = [torch.accelerator.current_stream(d).record_event() for d in _devices(state)]

        def complete() -> None:
            for event in copied:
                event.synchronize()

        image = FileImage(bytes_of(self._arena[:size]), self._fd, complete)
        return replace(state, tensors=copies, image=image)

    def _replace_arena(self, size: int, *, locked: bool) -> None:
        for end in self._ends:
            end()
        self._ends, self._fd, self._locked = [], None, locked
        self._arena = torch.empty(0)  # not both at a time
        self._arena = self._memory(size)
        if locked and torch.cuda.is_available():
            # torch's allocator of it rounds up to a power of two. If refused, copies are slower.
            self._ends[:0] = filter(None, [lock_pages(self._arena)])

    def _memory(self, size: int) -> torch.Tensor:
        try:
            fd, content = memory_file(size)
        except OSError:
            log.warning('The state cannot be left in memory', exc_info=True)
            return torch.empty(size, dtype=torch.uint8, device='cpu')
        self._fd, self._ends = fd, [weakref.finalize(self, os.close, fd)]
        return torch.frombuffer(content, dtype=torch.uint8)


def _devices(state: State) -> set[torch.device]:
    return {tensor.device for tensor in state.tensors.values()} - {torch.device('cpu')}
