"""What a piece hands in for outer steps at other sites: the weights, or what it has changed.

It is put in blocks before the checkpoint is committed that names it, by the key and the SHA-256
digest of a list, which has those of the blocks. So what counts is what a piece has committed, and
what a late process puts does not; and nothing is used but what was handed in, whoever may write
where it was. With the checkpoint, it is removed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.checkpoint import outer_means as means
from parsl_freetrain.training.checkpoint.block_digests import BLOCK, digest
from parsl_freetrain.training.checkpoint.outer import OuterWeights
from parsl_freetrain.training.checkpoint.parts import Contents, dtype_name, entries_of
from parsl_freetrain.training.checkpoint.safetensors_io import Piece, layout_of
from parsl_freetrain.training.checkpoint.source import PartReader
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.transport import Disk, FileBlock
from parsl_freetrain.training.spec.diloco import training_of
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.transports import Transport

log = logging.getLogger(__name__)

T = TypeVar('T')
_FILE = 'end.safetensors'
_PAUSES_S = 1.0, 2.0, 4.0, 8.0, 16.0, 32.0

Block = tuple[str, str]  # its key, and its digest


class HandedIn(msgspec.Struct, frozen=True):
    contents: Contents
    blocks: tuple[Block, ...]
    position: dict[str, Any]
    metrics: dict[str, float]
    #: Of each tensor, its type and shape, which are not those of what is compressed.
    held: dict[str, tuple[str, tuple[int, ...]]]


def hand_in(order: FragmentOrder, state: State, metrics: Mapping[str, float]) -> str:
    """Put what outer steps elsewhere need of a state at the end of a round; returns where. '': no
    state of that, or there is nobody elsewhere. FreeTrainError if the transport does not take it.
    """
    diloco = order.spec.diloco
    whole = state.structure['rest']['position'] if state.structure is not None else {}
    if diloco is None or diloco.transport is None or not whole.get('round_ended'):
        return ''
    transport, compress = diloco.transport, diloco.compress
    length, samples = diloco.steps * whole['batch_size'], whole['samples']
    position = {key: whole[key] for key in ('weights', 'round_ended', 'round_from')}
    weights: dict[str, str] = position['weights']
    training = training_of(order.store, order.trainer, order.spec.replica)
    began = OuterWeights(*training, order.spec.replica)
    before = began.reader(diloco.begins_with(samples - length, length)) if compress else None
    ours = sha256(order.store.encode()).hexdigest()[:16]  # others may train one of that name
    name = f'{order.trainer}-{ours}-{samples}'
    own = {
        key: state.tensors[key]
        for key in means.once(state.tensors, weights)
        if means.takes_part(key, state.tensors[key].dtype)
    }

    def change(reader: PartReader, how: str, key: str) -> torch.Tensor:
        first = reader.whole(key)
        return means.compressed(first - own[key].to(first.dtype), how)

    pieces = []
    for key, tensor in own.items():
        dtype, shape = tensor.dtype, tuple(tensor.shape)
        if compress and before and key in weights:
            size = means.compressed_size(means.precise(dtype), shape, compress)
            pieces.append(Piece(key, torch.uint8, (size,), partial(change, before, compress, key)))
        else:
            pieces.append(Piece(key, dtype, shape, partial(own.__getitem__, key)))
    layout = layout_of(pieces)
    blocks: list[Block] = []
    digests: list[str] = []
    for block in _blocks(layout.content()):
        blocks.append(_put(transport, f'{name}-{len(blocks)}', block))
        digests.append(digest(block))
    frozen = state.shared.tensors if state.shared is not None else {}
    tensors = {k: e for k, e in frozen.items() if means.takes_part(k, getattr(torch, e.dtype))}
    tensors |= entries_of(layout, _FILE)
    contents = Contents(tensors, {_FILE: (layout.nbytes, tuple(digests))}, b'')
    held = {k: (dtype_name(t.dtype), tuple(t.shape)) for k, t in own.items()}
    listed = HandedIn(contents, tuple(blocks), position, dict(metrics), held)
    key, its = _put(transport, f'{name}-list', msgspec.msgpack.encode(listed))
    return f'{its} {key}'


class EndElsewhere(means.End):
    """A replica's state at the end of a round, as it was handed in. FreeTrainError if it is gone,
    or was altered.
    """

    def __init__(self, transport: Transport, told: str) -> None:
        listed = _list(transport, told)
        contents, position = listed.contents, listed.position
        reader = PartReader(contents, _Elsewhere(transport, listed))
        super().__init__(contents, reader, position, listed.metrics)
        own = {k: (getattr(torch, kind), shape) for k, (kind, shape) in listed.held.items()}
        self._missing = {name for name, _ in self.shared}
        self.held = {k: its for k, its in self.held.items() if k in self._missing} | own

    def whole(self, name: str) -> torch.Tensor:
        if name in self._missing:
            raise FreeTrainError(
                f'{name!r}, which no optimizer trains, has changed in some replicas only, and the '
                'others have not handed it in: let it be the same in all.'
            )
        return super().whole(name)

    def change(self, name: str, began: torch.Tensor, how: str) -> torch.Tensor:
        return means.decompressed(super().whole(name), how, began)


def forget(transport: Transport, told: str) -> None:
    """Remove what was handed in, as far as that is possible now."""
    try:
        for key, _ in _list(transport, told).blocks:
            transport.remove(key)
        transport.remove(told.partition(' ')[2])
    except Exception:
        log.warning('What was handed in could not be removed', exc_info=True)


class _Elsewhere(Disk):
    """Blocks that were handed in, each of which is remembered for a while."""

    def __init__(self, transport: Transport, listed: HandedIn) -> None:
        super().__init__(Path(), listed.contents.files)
        self._transport, self._blocks = transport, listed.blocks

    def _read(self, block: FileBlock, target: memoryview) -> None:
        target[:] = _get(self._transport, *self._blocks[block[1]])


def _list(transport: Transport, told: str) -> HandedIn:
    its, _, key = told.partition(' ')
    return msgspec.msgpack.decode(_get(transport, key, its), type=HandedIn)


def _put(transport: Transport, name: str, block: bytes) -> Block:
    its = sha256(block).hexdigest()
    put = partial(transport.put, f'{name}-{its[:32]}', block)
    return _patiently(put, f'{len(block)} bytes cannot be handed in to {transport}'), its


def _get(transport: Transport, key: str, its: str) -> bytes:
    what = f'What another replica has handed in to {transport}'
    try:
        found = _patiently(partial(transport.get, key), f'{what} cannot be had')
    except LookupError:
        found = b''
    if sha256(found).hexdigest() != its:
        raise FreeTrainError(
            f'{what}, {key}, is {"not what it was" if found else "gone"}: put it back. Or remove '
            'the checkpoint at the end of that round from the folder of each replica whose part '
            'is gone, so that it trains the rest of its piece once more.'
        )
    return found


def _patiently(do: Callable[[], T], what: str) -> T:
    for pause_s in (*_PAUSES_S, None):
        try:
            return do()
        except (FreeTrainError, LookupError):
            raise
        except Exception as error:
            if pause_s is None:
                raise FreeTrainError(f'{what} ({type(error).__name__}: {error}).') from error
            time.sleep(pause_s)
    raise AssertionError('unreachable')


def _blocks(content: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    block = bytearray()
    for part in content:
        view = memoryview(part)
        while view:
            taken, view = view[: BLOCK - len(block)], view[BLOCK - len(block) :]
            block += taken
            if len(block) == BLOCK:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)
