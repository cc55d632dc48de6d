"""A journal's file: a head line, then records: a mark, the length, CRC-32, msgpack."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import AnyEvent, Event

NAME = 'ledger.journal'  # in a checkpoint_dir
VERSION = 1
_KIND = b'FreeTrain journal '
HEAD = _KIND + b'%d\n' % VERSION
_MARK = b'\xfcFTj'
_RECORD = struct.Struct('<4sII')
_MOST = 2**30
_CHUNK = 2**23

_decoder: msgspec.msgpack.Decoder[list[Event]] = msgspec.msgpack.Decoder(list[AnyEvent])


class Extent(NamedTuple):
    """Bytes of the file, from ``start`` to ``end``; ``content`` of a record, None: unreadable."""

    start: int
    end: int
    content: bytes | None

    def events(self) -> list[Event]:
        assert self.content is not None
        return _decoder.decode(self.content)


def record(content: bytes) -> bytes:
    return _RECORD.pack(_MARK, len(content), zlib.crc32(content)) + content


def check_head(file: BinaryIO, path: Path) -> None:
    """Raise BadInput unless a file is a journal of this version; it stands at a record then."""
    file.seek(0)
    head = file.read(len(HEAD))
    if not head:
        raise BadInput(f'{path} is empty: no run has written to it yet.')
    if not head.startswith(_KIND):
        raise BadInput(
            f'{path} is not a FreeTrain ledger; name the file that a run writes, or one that does '
            'not exist yet.'
        )
    if head != HEAD:
        version = head[len(_KIND) :].decode(errors='replace').strip()
        raise BadInput(
            f'{path} is a ledger of version {version}, and this parsl-freetrain reads version '
            f'{VERSION}; use the release that wrote it.'
        )


def is_remains(file: BinaryIO, ours: bool) -> bool:
    """Whether it remains of a journal that was cut, or lost its beginning (``ours``: surely)."""
    file.seek(0)
    begins = file.read(_CHUNK)
    return not begins.startswith(HEAD) and (
        HEAD.startswith(begins)
        or not begins.strip(b'\0')
        or (_KIND not in begins and (ours or _MARK in begins))
    )


def scan(file: BinaryIO, begin: int) -> Iterator[Extent]:
    """Whole records from a place on, and unreadable places between them; no incomplete last one."""
    file.seek(begin)
    data, base, at = b'', begin, 0  # the data begin at ``base`` in the file
    damaged_from: int | None = None
    false = 0  # bytes of what claimed to be records
    size = os.fstat(file.fileno()).st_size
    while True:
        end = _end_of_record(data, at, size - base)
        if end is None:  # more data are needed to know
            if more := file.read(max(_CHUNK, len(data) - at)):
                data, base, at = data[at:] + more, base + at, 0
                continue
            if at >= len(data):
                return
        if end is None or end <= 0:
            if damaged_from is None:
                damaged_from = base + at
            false -= end or 0
            if false > _MOST:  # it was made to take long
                yield Extent(damaged_from, size, None)
                return
            found = data.find(_MARK, at + 1)
            if found >= 0:
                at = found
                continue
            rest = base + max(at + 1, len(data) - len(_MARK) + 1)
            if rest >= size:
                return
            try:
                data, base, at = b'', file.seek(rest, os.SEEK_DATA), 0  # a hole may be terabytes
            except OSError:  # there is only a hole
                return
            continue
        if damaged_from is not None:
            yield Extent(damaged_from, base + at, None)
            damaged_from = None
        yield Extent(base + at, base + end, data[at + _RECORD.size : end])
        at = end


def _end_of_record(data: bytes, at: int, size: int) -> int | None:
    """Its end; 0: none, or cut; None: read more; negative: the length of a wrong one."""
    if len(data) - at < _RECORD.size:
        return None
    mark, length, crc = _RECORD.unpack_from(data, at)
    end: int = at + _RECORD.size + length
    if mark != _MARK or length > _MOST or end > size:
        return 0
    if end > len(data):
        return None
    return end if zlib.crc32(memoryview(data)[at + _RECORD.size : end]) == crc else at - end
