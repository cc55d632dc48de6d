"""The shapes of a trainer: which there are, and which a mode supports."""

import math
from collections.abc import Mapping
from contextlib import suppress

from msgspec import structs

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.spec.mode import ADASUM, STOP, Mode, Reproducible, Scaled, Throughput

Shapes = tuple[Shape, ...]


def check_shapes(by_count: Mapping[int, Shapes], mode: Mode, per_node: int) -> None:
    """Raises BadInput if shapes do not fit their node count, the mode or each other."""
    for nodes, shapes in by_count.items():
        _check_count(shapes, mode, nodes, per_node)
    known = [shape for shapes in by_count.values() for shape in shapes]
    sharded = next((shape for shape in known if shape.sharded), None)
    staged = next((shape for shape in known if shape.pipeline > 1), None)
    if sharded is not None and staged is not None:
        raise BadInput(
            f'the shape {sharded} divides parameters, and the shape {staged} the stages of a '
            'pipeline, whose checkpoints are of different kinds: give a trainer shapes of one kind.'
        )
    parts = {shape.tensor: shape for shape in known}
    if isinstance(mode, Reproducible) and len(parts) > 1:
        raise BadInput(
            f'the shapes {" and ".join(map(str, parts.values()))} have different tensor parts, '
            'which give different bits, and which of them are used depends on nodes and speed: in '
            'reproducible mode, give shapes with the same tensor, or say mode=Throughput().'
        )


def identity_of(by_count: Mapping[int, Shapes], mode: Mode) -> dict[str, int]:
    """What must be equal to continue from a checkpoint: in reproducible mode, the tensor part."""
    tensor = max((shape.tensor for shapes in by_count.values() for shape in shapes), default=1)
    return {'tensor': tensor} if isinstance(mode, Reproducible) and tensor > 1 else {}


def _check_count(shapes: Shapes, mode: Mode, nodes: int, per_node: int) -> None:
    where, here = f'{nodes} nodes', nodes * per_node
    if not shapes:
        raise BadInput(f'{where} have an empty list of shapes; give at least one.')
    for shape in shapes:
        if shape.ranks != here:
            raise BadInput(
                f'the shape of {nodes} nodes is {shape}, which takes {shape.ranks} ranks; its '
                f'parts must multiply to {here}, the ranks of {nodes} nodes with {per_node} each.'
            )
        check_shape(shape, mode, where)
    if len(set(shapes)) < len(shapes):
        raise BadInput(f'{where} have the same shape twice: {", ".join(map(str, shapes))}.')


def all_shapes(ranks: int, mode: Mode, most: int) -> Shapes:
    """All shapes of ranks in this mode, least memory first. ``most``: the largest fragment's."""
    if isinstance(mode, Reproducible) and mode.shards is None:
        mode = structs.replace(mode, shards=most)
    found = []
    for shard in range(ranks, 0, -1):
        if ranks % shard == 0:
            with suppress(BadInput):
                shape = Shape(data=ranks // shard, shard=shard)
                check_shape(shape, mode, '')
                found.append(shape)
    return tuple(found)


def check_shape(shape: Shape, mode: Mode, where: str) -> None:
    """Raises BadInput, beginning with ``where``, if the mode does not support the shape."""
    if math.prod(shape.sizes[1:]) == 1:
        return
    if shape.sharded:
        _check_sharded(shape, mode, where)
        return
    if not isinstance(mode, Throughput):
        raise BadInput(
            f'{where}: the shape {shape} divides more than the data, and the mode is {mode}; say '
            'mode=Throughput().'
        )
    if shape.pipeline > 1 and mode.on_nan != STOP:
        raise BadInput(
            f'{where}: on_nan is {mode.on_nan!r}, but a single stage of a pipeline cannot leave '
            "out a step; say on_nan='stop', or give shapes without a pipeline."
        )


def _check_sharded(shape: Shape, mode: Mode, where: str) -> None:
    if math.prod(shape.spatial) * shape.pipeline > 1:
        raise BadInput(
            f'{where}: the shape divides the parameters (shard {shape.shard}, tensor '
            f'{shape.tensor}) and also space or stages; say either.'
        )
    if isinstance(mode, Scaled) and mode.combine == ADASUM:
        raise BadInput(
            f"{where}: combine='adasum' needs whole gradients, and in the shape {shape} no rank "
            "has them; say combine='mean'."
        )
    if not isinstance(mode, Reproducible):
        return
    shards, divided = mode.shards or 0, shape.shard & (shape.shard - 1)
    if divided or shards % shape.batch_parts:
        raise BadInput(
            f'{where}: for a reproducible sum, shard must be a power of two, and data x shard '
            f'must divide the {shards} virtual shards; shard is {shape.shard}, and data x shard '
            f'is {shape.batch_parts}.'
        )


def check_mixed(mode: Mode, shapes: Mapping[int, Shapes], *, ahead: bool) -> None:
    """Raises BadInput for what cannot use nodes of several classes at once."""
    if not isinstance(mode, Reproducible) or shapes:
        raise BadInput(
            'Scaling(mixed=True) needs mode=Reproducible(...) without shapes: only virtual shards '
            'can be divided among nodes of unequal speed.'
        )
    if ahead:
        raise BadInput(
            'Scaling(mixed=True) and Ranks(ahead=True) do not go together: which shards a rank '
            'gets is not known before its fragment starts.'
        )
