"""The state that training continues from: what each rank writes of it, and what each reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.training.checkpoint import local_shard
from parsl_freetrain.training.checkpoint import state as st
from parsl_freetrain.training.checkpoint.optimizer_state import every_parameter
from parsl_freetrain.training.checkpoint.part_reader import PartReader
from parsl_freetrain.training.checkpoint.parts import Contents
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.checkpoint.transport import Disk, Transport


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
        boxes = {name: local_shard.Box.whole(shape) for name, shape in shapes.items()}
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
