"""The state of models whose parameters are divided among ranks: what each rank writes and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.training.checkpoint.local_shard import (
    Box,
    box_of,
    divided_like,
    holders,
    local,
)
from parsl_freetrain.training.checkpoint.part_reader import BlockSource, PartReader
from parsl_freetrain.training.checkpoint.state import (
    Position,
    Saved,
    State,
    assemble,
    check_shapes,
    names_of,
    shapes_of,
)
from parsl_freetrain.training.checkpoint.trainables import Prepared


def divided(state: State, mesh: DeviceMesh, rank: int) -> State:
    """This rank's part of a state that all ranks of a mesh have collected. Each part of a tensor
    has one rank that writes it; ranks that hold the same parts share them.
    """
    tensors, boxes = {}, {}
    for number, (name, tensor) in enumerate(state.tensors.items()):
        held_by, box = holders(tensor, mesh), box_of(tensor)
        if (box.numel or box.sizes == box.shape) and held_by[number % len(held_by)] == rank:
            tensors[name], boxes[name] = local(tensor), box
    return State(tensors, state.structure if rank == 0 else None, boxes)


class Opened:
    """A checkpoint of which only the structure has been read. Each rank reads its own parts of the
    tensors, once it has the models.

    Attributes
    ----------
    path, position
        As in :class:`Saved`.

    Raises
    ------
    BadInput
        If it is not a checkpoint of this format.
    Damaged
        If it is not what was committed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = PartReader(Path(path), verify=True)
        self._structure = self._reader.structure()
        self.position = Position(**self._structure['rest']['position'])

    @property
    def files(self) -> Mapping[str, tuple[int, tuple[str, ...]]]:
        """Of each file, its size in bytes and the digests of its blocks."""
        return self._reader.files

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far."""
        return self._reader.bytes_read

    def load(self, prepared: Prepared, source: BlockSource | None = None) -> Saved:
        """Read what belongs to models and optimizers, divided as they are; blocks that ``source``
        has are not read. Raises BadInput if the models are others; Damaged if what is read is not
        what was committed.
        """
        shapes, paths = self._reader.shapes(), self._structure['paths']
        models = {
            name: model.state_dict()
            for name, model in zip(names_of('model'), prepared.models, strict=False)
        }
        parameters = {
            f'{number}.{name}': parameter
            for number, model in enumerate(prepared.models, 1)
            for name, parameter in model.named_parameters()
        }
        # The state was saved without shapes: its parameters have numbers.
        numbered = {
            (name, number): parameter
            for name, optimizer in zip(names_of('optimizer'), prepared.optimizers, strict=False)
            for number, parameter in enumerate(
                parameter for group in optimizer.param_groups for parameter in group['params']
            )
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
            if isinstance(found, torch.Tensor) and tuple(found.shape) == shapes[name]:
                like[name] = found
        for number, (name, state) in enumerate(models.items()):
            there = {path[1]: shapes[key] for key, path in paths.items() if path[0] == name}
            check_shapes(shapes_of(state), there, number, self.path)
        parts = self._reader.read(
            {
                name: box_of(like[name]) if name in like else Box.whole(shape)
                for name, shape in shapes.items()
            },
            source,
        )
        tensors = {
            name: divided_like(part.to(like[name].device), like[name]) if name in like else part
            for name, part in parts.items()
        }
        return assemble(self.path, State(tensors, self._structure))
