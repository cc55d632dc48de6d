"""What no optimizer trains is written once; a trainer's later checkpoints refer to that file."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from parsl_freetrain.host.files import make_dir, open_regular, sync_dir
from parsl_freetrain.training.checkpoint import parts
from parsl_freetrain.training.checkpoint.block_digests import blocks_of, write_hashed
from parsl_freetrain.training.checkpoint.local_shard import real
from parsl_freetrain.training.checkpoint.manifest import SHARED, path_in
from parsl_freetrain.training.checkpoint.source import Opened
from parsl_freetrain.training.checkpoint.state import State, collect, content_of, names_of
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of

log = logging.getLogger(__name__)

_LEAST, _LEAST_IN_ALL = 2**10, 2**16  # bytes of a tensor, and of all of them
_ROW = 2**10  # words
_MIX = -0x61C8864680B583EB, -0xAE502812AA7333  # of SplitMix64 and MurmurHash3

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A tensor's name, and where the part of it begins that a rank has, and its sizes."""


def untrained(prepared: Prepared, state: State) -> set[str]:
    """The names in a whole state of parameters that no optimizer changes."""
    trained = {id(p) for one in prepared.optimizers for p in parameters_of(one) if p.requires_grad}
    frozen = {
        (called, name)
        for called, model in zip(names_of('model'), prepared.models, strict=False)
        for name, parameter in torch.nn.Module.named_parameters(model, remove_duplicate=False)
        if id(parameter) not in trained
    }
    paths = (state.structure or {'paths': {}})['paths']
    return {name for name, path in paths.items() if path[:2] in frozen}


def write_anew(folder: Path, opened: Opened, prepared: Prepared) -> bool:
    """Write anew, with the tensors of models, the files of several checkpoints in a folder that are
    not what a checkpoint refers to. False: one of them would not be, either.
    """
    own = collect(content_of(prepared), opened.position).tensors
    for file, (size, blocks) in opened.contents.files.items():
        path = path_in(folder / 'any', file)
        if not file.startswith(SHARED) or _is_right(path, blocks):
            continue
        at = {
            name: chunk.at[1]
            for name, entry in opened.contents.tensors.items()
            for chunk in entry.chunks
            if chunk.at[0] == file
        }
        layout, _ = parts.placed(
            {n: own[n] for n in sorted(at, key=at.__getitem__) if n in own}, {}
        )
        draft = path.with_name(f'{path.name}.anew')
        draft.unlink(missing_ok=True)
        make_dir(path.parent)
        if layout.nbytes != size or write_hashed(draft, layout.content()) != blocks:
            draft.unlink(missing_ok=True)
            return False
        draft.replace(path)
        sync_dir(path.parent)
    return True


def _is_right(path: Path, blocks: tuple[str, ...]) -> bool:
    with suppress(OSError), open_regular(path) as file:
        return blocks_of(file) == blocks
    return False


class Frozen:
    """What checkpoints refer to a file for, where its fingerprint is that of the written bytes."""

    def __init__(self, store: PosixCheckpointStore, fragment: int, rank: int) -> None:
        self._store, self._file = store, f'{SHARED}f{fragment:06d}-r{rank}.safetensors'
        self._entries: dict[Key, parts.Entry] = {}
        self._files: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._begun = self._looked = False
        self._known: set[str] | None = None  # all names there; None: there is no checkpoint

    def begin(self, state: State, names: Collection[str]) -> None:
        """Find what earlier checkpoints refer to, or write it in a thread; else they hold all."""
        if self._begun:
            return
        self._begun = True
        try:
            self._look()
            known = names if self._known is None else self._known
            wanted = {
                name: tensor
                for name, tensor in state.tensors.items()
                if name in known and _key(name, state) not in self._entries
                if tensor.nbytes >= _LEAST
            }
            if sum(tensor.nbytes for tensor in wanted.values()) >= _LEAST_IN_ALL:
                self._write(State(wanted, None, state.boxes))
        except Exception:  # it only saves room
            log.warning('Checkpoints also hold what is not trained', exc_info=True)

    def without(self, state: State) -> State:
        """A state that refers to the files for what is in them unchanged."""
        with suppress(Exception):  # the first state may be saved before begin()
            self._look()
        keys = [_key(name, state) for name in state.tensors]
        here = {key: state.tensors[key[0]] for key in keys if key in self._entries}
        if not here:
            return state
        found: dict[str, parts.Entry] = {}
        for key, marks in zip(here, fingerprints(list(here.values())), strict=True):
            entry = self._entries[key]
            if entry.chunks[0].marks == marks and entry.dtype == parts.dtype_name(here[key].dtype):
                found[key[0]] = entry
            else:
                del self._entries[key]  # somebody changes it
        names = {entry.chunks[0].at[0] for entry in found.values()}
        files = {name: self._files[name] for name in names}
        rest = {name: tensor for name, tensor in state.tensors.items() if name not in found}
        return replace(state, tensors=rest, shared=parts.Contents(found, files, b''))

    def _look(self) -> None:
        """Take what the newest checkpoint refers to, which was verified when it was read."""
        if self._looked:
            return
        self._looked = True
        earlier = self._store.checkpoints()
        if not earlier or not earlier[-1].samples:
            return
        contents = parts.Contents.read(Path(earlier[-1].path))
        self._files = {n: file for n, file in contents.files.items() if n.startswith(SHARED)}
        for name, entry in contents.tensors.items():
            for chunk in entry.chunks:
                if chunk.at[0] in self._files:
                    key = name, chunk.offsets, chunk.sizes
                    self._entries[key] = parts.Entry(entry.dtype, entry.shape, (chunk,))
        self._known = {name for name, *_ in self._entries}

    def _write(self, state: State) -> None:
        tensors = _Copies(state.tensors)
        layout, places = parts.placed(tensors, state.boxes)
        path = path_in(self._store.folder / 'any', self._file)
        make_dir(path.parent)
        blocks = write_hashed(path, layout.content())
        sync_dir(path.parent)
        self._files[self._file] = layout.nbytes, blocks
        for name, tensor in state.tensors.items():
            how = parts.box_in(name, tensor, state.boxes), (self._file, *places[name])
            self._entries[_key(name, state)] = parts.entry_of(tensor, *how, tensors.marks[name])


class _Copies(dict[str, torch.Tensor]):
    """Tensors of which a copy is got, so that ``marks`` are of the bytes that are written."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.marks: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        copy = super().__getitem__(name).to('cpu', copy=True).contiguous()
        (self.marks[name],) = fingerprints([copy])
        return copy


@torch.no_grad()
def fingerprints(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Of each tensor, sums of its bits by which one notices that it, or its order, has changed."""
    found = [torch.stack(list(_sums(one))) for one in tensors]
    return [tuple(one) for one in torch.stack([f.to(found[0].device) for f in found]).tolist()]


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Integers, whose sums are the same in any order, and on all devices."""
    flat = real(tensor.detach()).contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rows = words[: len(words) // _ROW * _ROW].view(-1, _ROW)
    for part in (rows.sum(0), rows.sum(1), words[rows.numel() :], flat[words.numel() * 8 :].long()):
        place = torch.arange(1, len(part) + 1, dtype=torch.int64, device=tensor.device)
        mixed = part + place * _MIX[0]
        mixed = (mixed ^ (mixed >> 33)) * _MIX[1]
        yield (mixed ^ (mixed >> 33)).sum()


def _key(name: str, state: State) -> Key:
    box = parts.box_in(name, state.tensors[name], state.boxes)
    return name, box.offsets, box.sizes
