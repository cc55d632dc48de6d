"""The state that training continues from: what each rank writes of it, and what each reads, whole
tensors or parts of them, whatever ranks left it.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint import block_digests as hashing
from parsl_freetrain.training.checkpoint import local_shard
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.local_shard import Box
from parsl_freetrain.training.checkpoint.optimizer_state import every_parameter
from parsl_freetrain.training.checkpoint.parts import Chunk, Contents
from parsl_freetrain.training.checkpoint.safetensors_io import bytes_of
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.checkpoint.transport import Disk, FileBlock, Transport


def divided(state: st.State, mesh: DeviceMesh | None = None, rank: int = 0) -> st.State:
    """What this rank holds of a state. With the mesh that has collected it, what it writes: those
    with the same share it, and the first one has the structure.
    """
    tensors, boxes = {}, {}
    for number, (name, tensor) in enumerate(state.tensors.items()):
        held_by = (rank,) if mesh is None else local_shard.holders(tensor, mesh)
        box = local_shard.box_of(tensor)
        if (box.numel or box.sizes == box.shape) and held_by[number % len(held_by)] == rank:
            tensors[name], boxes[name] = local_shard.local(tensor), box
    return st.State(tensors, state.structure if rank == 0 else None, boxes)


@dataclass
class _Span:
    """Rows of a chunk, and the part of a wanted tensor that is in them."""

    file: str
    start: int
    rows: Box
    wanted: Box
    target: torch.Tensor
    _bytes: memoryview | None = None
    _read: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def size(self) -> int:
        return self.rows.numel * self.target.element_size()

    @property
    def blocks(self) -> range:
        last = (self.start + self.size - 1) // hashing.BLOCK
        return range(self.start // hashing.BLOCK, last + 1 if self.size else 0)

    def take(self, number: int, content: memoryview) -> None:
        """Take what is in a block; call with all of :attr:`blocks`, in order."""
        part = self.wanted.overlap(self.rows)
        assert part is not None
        target = self.wanted.inside(self.target, part)
        direct = part == self.rows and target.is_contiguous()
        if self._bytes is None:
            self._read = target if direct else torch.empty(self.rows.sizes, dtype=target.dtype)
            self._bytes = bytes_of(self._read)
        begins = number * hashing.BLOCK
        first = max(self.start, begins)
        end = min(self.start + self.size, begins + len(content))
        self._bytes[first - self.start : end - self.start] = content[first - begins : end - begins]
        if end == self.start + self.size:
            if not direct:
                target.copy_(self.rows.inside(self._read, part))
            self._bytes, self._read = None, torch.empty(0)


class PartReader:
    def __init__(self, contents: Contents, transport: Transport) -> None:
        self._contents, self._transport = contents, transport

    @classmethod
    def of(cls, folder: Path) -> 'PartReader':
        """Of a checkpoint's directory; Damaged, or BadInput for another format."""
        contents = Contents.read(folder)
        return cls(contents, Disk(folder, contents.files))

    def shapes(self, prefix: str = '') -> dict[str, tuple[int, ...]]:
        """The shapes of the whole tensors whose names begin with ``prefix``."""
        every = self._contents.tensors.items()
        return {name: entry.shape for name, entry in every if name.startswith(prefix)}

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._contents.tensors[name].dtype
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise BadInput(
                f'A checkpoint holds tensors of type {dtype!r}, which this version of torch '
                'does not know: use a newer one.'
            )
        return found

    def structure(self) -> Any:
        """What was saved beside the tensors. No code of the file is run."""
        content = io.BytesIO(self._contents.structure)
        return torch.load(content, map_location='cpu', weights_only=True)

    def read(self, wanted: Mapping[str, Box]) -> dict[str, torch.Tensor]:
        """The wanted parts on the CPU, by name; Damaged if altered, OSError without an answer."""
        found = {one: torch.empty(box.sizes, dtype=self.dtype(one)) for one, box in wanted.items()}
        spans: dict[FileBlock, list[_Span]] = {}
        for name, box in wanted.items():
            for chunk in self._contents.tensors[name].chunks:
                if (span := _span(chunk, box, found[name])) is not None:
                    for number in span.blocks:
                        spans.setdefault((span.file, number), []).append(span)
        needed = sorted(spans)
        for (file, number), content in zip(needed, self._transport.fetch(needed), strict=True):
            for span in spans[file, number]:
                span.take(number, content)
        return found

    def whole(self, name: str) -> torch.Tensor:
        return self.read({name: Box.whole(self._contents.tensors[name].shape)})[name]


def _span(chunk: Chunk, wanted: Box, target: torch.Tensor) -> _Span | None:
    """The rows of a chunk that a wanted part needs; None: it needs none."""
    held = Box(wanted.shape, chunk.offsets, chunk.sizes)
    part = held.overlap(wanted)
    file, start, _ = chunk.at
    if part is None:
        return None
    if not held.sizes:
        return _Span(file, start, held, wanted, target)
    row = math.prod(held.sizes[1:]) * target.element_size()
    rows = Box(wanted.shape, (part.offsets[0], *held.offsets[1:]), (part.sizes[0], *held.sizes[1:]))
    return _Span(file, start + (part.offsets[0] - held.offsets[0]) * row, rows, wanted, target)


class Opened:
    """A state of which all but the tensors has been read; see :class:`Saved`."""

    def __init__(self, path: str, contents: Contents, transport: Transport) -> None:
        self.path = path
        self.contents, self._reader = contents, PartReader(contents, transport)
        self._structure = self._reader.structure()
        self.position = st.Position(**self._structure['rest']['position'])

    def load(self, prepared: Prepared | None = None) -> st.Saved:
        """The tensors; BadInput for other models, Damaged if they are not as committed."""
        shapes = self._reader.shapes()
        like = self._like(prepared, shapes) if prepared is not None else {}
        boxes = {name: Box.whole(shape) for name, shape in shapes.items()}
        boxes |= {name: local_shard.box_of(one) for name, one in like.items()}
        tensors = self._reader.read(boxes)
        for name, one in like.items():
            tensors[name] = local_shard.divided_like(tensors[name].to(one.device), one)
        return st.assemble(self.path, st.State(tensors, self._structure))

    def _like(
        self, prepared: Prepared, shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor]:
        """By names in the state: models' divided tensors, and parameters for optimizers' ones."""
        paths = self._structure['paths']
        named = zip(st.names_of('model'), prepared.models, strict=False)
        models = {name: model.state_dict() for name, model in named}
        parameters = dict(prepared.named_parameters())
        # The state was saved without shapes: its parameters have numbers.
        numbered = {
            (name, number): parameter
            for name, optimizer in zip(st.names_of('optimizer'), prepared.optimizers, strict=False)
            for number, parameter in enumerate(every_parameter(optimizer))
        }
        like: dict[str, torch.Tensor] = {}
        for name, path in paths.items():
            match path:
                case (str(model), str(tensor)) if model in models:
                    found = models[model].get(tensor)
                case (_, 'state', str(parameter), *_):
                    found = parameters.get(parameter)
                case (str(optimizer), 'state', int(number), *_):
                    found = numbered.get((optimizer, number))
                case _:
                    found = None
            fits = getattr(found, 'shape', None) == shapes[name]
            if isinstance(found, torch.Tensor) and fits and local_shard.is_divided(found):
                like[name] = found
        for number, (name, state) in enumerate(models.items()):
            there = {path[1]: shapes[key] for key, path in paths.items() if path[0] == name}
            st.check_shapes(st.shapes_of(state), there, number, self.path)
        return like


def open_checkpoint(path: str) -> Opened:
    """A checkpoint, to be read from its directory; Damaged, or BadInput for another format."""
    contents = Contents.read(Path(path))
    return Opened(path, contents, Disk(Path(path), contents.files))


def read_state(path: str) -> st.Saved:
    """A verified checkpoint, all on the CPU; no code of the file is run. Raises as ``load``."""
    return open_checkpoint(path).load()
