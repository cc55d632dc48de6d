"""Memory that the ranks of one computer share, so that sums of theirs need not be sent."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from parsl_freetrain.training.checkpoint.transport_memory import memory_file
from parsl_freetrain.training.comm.peers import Peers, gather_bytes

_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
_MOST = 256  # bytes of what a rank tells of its memory
_Told = tuple[str, int, int, int, int]
"""The computer, the process, its file in memory, and device and inode of that."""


class SharedRows:
    """``rows``: by rank, a flat tensor for all; page-locked if ``device`` copies faster then."""

    def __init__(self, rows: list[torch.Tensor], device: torch.device) -> None:
        self.rows = rows
        if device.type == 'cuda':
            cudart = torch.cuda.cudart()
            for row in rows:
                cudart.cudaHostRegister(row.data_ptr(), row.nbytes, 0)
                ends = weakref.finalize(self, cudart.cudaHostUnregister, row.data_ptr())
                ends.atexit = False


def share(
    peers: Peers, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> SharedRows | None:
    """Memory for so many elements of each rank; None if too little, or not on one computer."""
    own, told = -1, b''
    try:
        own, kept = memory_file(max(sizes[peers.rank] * dtype.itemsize, 1))
        is_it = os.fstat(own)
        here = _BOOT_ID.read_text(), os.getpid(), own, is_it.st_dev, is_it.st_ino
        told = msgspec.msgpack.encode(here)
    except OSError:
        kept = memoryview(b'')
    rows: list[torch.Tensor] = []
    try:
        each = zip(gather_bytes(peers, told, _MOST), sizes, strict=True)
        for rank, (said, size) in enumerate(each):
            length = max(size * dtype.itemsize, 1)
            content = kept if rank == peers.rank else _map(said, length)
            rows.append(torch.frombuffer(content, dtype=torch.uint8)[: size * dtype.itemsize])
    except (OSError, msgspec.DecodeError):
        rows = []
    everywhere = all(found == b'\1' for found in gather_bytes(peers, bytes([bool(rows)]), 1))
    if own >= 0:
        os.close(own)
    return SharedRows([row.view(dtype) for row in rows], device) if everywhere else None


def _map(said: bytes, length: int) -> mmap.mmap:
    boot_id, pid, number, *is_it = msgspec.msgpack.decode(said, type=_Told)
    if boot_id != _BOOT_ID.read_text():
        raise OSError('another computer')
    fd = os.open(f'/proc/{pid}/fd/{number}', os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if [found.st_dev, found.st_ino] != is_it:  # in a container, processes have other numbers
            raise OSError('another process')
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)
