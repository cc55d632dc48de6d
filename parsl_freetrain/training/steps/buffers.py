"""The buffers of models, such as running statistics, which forward passes change."""

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch.distributed import ProcessGroup

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.collectives import broadcast_into
from parsl_freetrain.training.comm.peers import Peers

_SMALL_BYTES = 4096


class Buffers:
    """Remembers the buffers of models, and undoes what was done to them, also by other tensors in
    their places. Floating-point ones can be added up, in rows of ``row_size``: weighted values,
    then their weights, and 0 for what has not changed. ``integers``: other types, the largest
    first; ``changed_firsts``: of those, in the first shard. Nothing here reads a number, or
    launches an operation for each buffer.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], dtype: torch.dtype = torch.float32
    ) -> None:
        self._places = [
            (module, module._buffers, name, _kind(buffer), buffer)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        places = self._places
        buffers = {id(b): b for *_, b in places if b is not None and is_plain(b)}.values()
        summed = [b for b in buffers if b.is_complex() or b.is_floating_point()]
        self._floating = [torch.view_as_real(b) if b.is_complex() else b for b in summed]
        others = [b for b in buffers if not (b.is_complex() or b.is_floating_point())]
        self.integers = sorted(others, key=lambda buffer: -buffer.element_size())
        self.dtype = reduce(torch.promote_types, (b.dtype for b in self._floating), dtype)
        self._size = sum(buffer.numel() for buffer in self._floating)
        self.row_size = 2 * self._size
        device = self._floating[0].device if self._floating else None
        self._before, self._now = torch.empty(2, self._size, dtype=self.dtype, device=device)
        self._zero = torch.zeros((), dtype=self.dtype, device=device)
        before, now = map(self._pieces, (self._before, self._now))
        self._integers_before = integers_before = list(map(torch.empty_like, self.integers))
        self._firsts = firsts = list(map(torch.empty_like, self.integers))
        self._to_before, self._to_now = Copies(before, self._floating), Copies(now, self._floating)
        self._from_before = Copies(self._floating, before)
        self._from_now = Copies(self._floating, now)
        self._integers_to_before = Copies(integers_before, self.integers)
        self._integers_from_before = Copies(self.integers, integers_before)
        self._to_firsts = Copies(firsts, self.integers)
        self._versions: list[int] = []
        self._settled = 0
        # A buffer of rows may be a queue, if an integer beside it says where it is filled.
        # Rows of one number are none: those of sizes of clusters begin to change one by one.
        matrices = ((i, b) for i, b in enumerate(self._floating) if sum(n > 1 for n in b.shape) > 1)
        rows = {id(b): i for i, b in matrices}
        self._rows = {
            rows[id(b)]: (name, type(module).__name__)
            for module, own, name, _, b in self._places
            if id(b) in rows and any(id(i) in set(map(id, own.values())) for i in self.integers)
        }
        self.changed_firsts: list[int] = []

    @torch.no_grad()
    def remember(self) -> None:
        self._to_before()
        self._integers_to_before()
        self._versions = [buffer._version for buffer in self.integers]

    @torch.no_grad()
    def undo(self) -> None:
        self.take()
        self._from_before()
        self._integers_from_before()

    def note_first(self) -> None:
        """Keep the present :attr:`integers` as those of the first shard, which count."""
        self._to_firsts()
        # PyTorch does not count all changes, so small ones are always taken for changed.
        self.changed_firsts = [
            i
            for i, buffer in enumerate(self.integers)
            if buffer.nbytes <= _SMALL_BYTES or buffer._version != self._versions[i]
        ]

    def take_firsts(self, peers: Peers, first: int, changed: Sequence[int]) -> None:
        """Set :attr:`integers` on all ranks to the first shard's, which rank ``first`` has."""
        if peers.world_size == 1:
            copy_all(self.integers, self._firsts)
            return
        self._integers_from_before()
        here = [self.integers[i] for i in changed]
        if here:
            own = _bytes_of([self._firsts[i] for i in changed])
            rows = peers.all_gather(torch.cat([own, own.new_empty(-len(own) % 8)]))
            self._unpack(rows[first, : len(own)], here)

    def take(self) -> None:
        """Call after a forward pass: copy tensors that are in the places of buffers into them.
        Raises BadInput if such a tensor has another shape or type. Where the buffer is not
        persistent, it stays as it is: a cache, such as of positions, that has grown.
        """
        for place in self._places:
            module, buffers, name, own, buffer = place
            kind = _kind(now := buffers.get(name))
            if now is buffer and kind == own:
                continue
            if kind == own and buffer is not None and now is not None and is_plain(buffer):
                with torch.no_grad():
                    buffer.copy_(now)
                buffers[name] = buffer
            elif name in module._non_persistent_buffers_set:
                self._places = [one for one in self._places if one is not place]
            else:
                raise BadInput(
                    f'The buffer {name!r} of a {type(module).__name__} was {_said(own)}, and the '
                    f'body of ctx.loop has put {_said(kind)} in its place: keep shape and type, '
                    'have it made by a first pass in ctx.warm_up(fn), before ctx.prepare, or '
                    'register it with persistent=False if it is only a cache.'
                )

    @torch.no_grad()
    def share(self, group: ProcessGroup | None) -> None:
        """Set all buffers to those of the group's first rank. All its ranks call this."""
        self.take()
        if self._floating:
            self._to_now()
            broadcast_into(self._now, group=group, group_src=0)
            self._from_now()
        if self.integers:
            packed = _bytes_of(self.integers)
            broadcast_into(packed, group=group, group_src=0)
            self._unpack(packed, self.integers)

    @staticmethod
    def _unpack(packed: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        pieces = packed.split([buffer.nbytes for buffer in into])
        copy_all(into, [p.view(b.dtype).view(b.shape) for p, b in zip(pieces, into, strict=True)])

    def enter(self, row: torch.Tensor, weight: float) -> None:
        """Write the values that have changed, times a weight, into a row, and their weights."""
        self._to_now()
        changed = torch.ne(self._now, self._before)
        torch.mul(changed, weight, out=row[self._size :])
        torch.where(changed, self._now * weight, self._zero, out=row[: self._size])

    def settle(self, total: torch.Tensor) -> None:
        """Set each value to the weighted mean of those that changed it, in a sum of rows."""
        weights = total[self._size :]
        changed = weights > 0
        self._settled += 1
        if self._rows and self._settled & (self._settled - 1) == 0:
            self._check_rows(self._pieces(changed))
        torch.where(changed, total[: self._size] / weights, self._before, out=self._now)
        self._from_now()

    def _check_rows(self, changed: Sequence[torch.Tensor]) -> None:
        """Rows that a shard has put in the places of others would become means of both."""
        for i, (name, module) in self._rows.items():
            for rows in (changed[i].flatten(1), changed[i].flatten(0, -2).T):
                replaced = rows.all(1)
                if 0 < int(replaced.sum()) < len(rows) and torch.equal(replaced, rows.any(1)):
                    raise BadInput(
                        f'The buffer {name!r} of a {module} changed in some of its rows only, as a '
                        'queue does. In reproducible mode each virtual shard would fill the same '
                        'rows, and their mean would count: fill it in ctx.after_step(fn), or use '
                        'mode=Throughput().'
                    )

    def changed(self) -> list[torch.Tensor]:
        """Numbers that are not zero if a buffer is not what it was."""
        found = []
        if self._floating:
            self._to_now()
            found.append(torch.ne(self._now, self._before).sum(dtype=torch.float64))
        if self.integers:
            both = (_bytes_of(self.integers), _bytes_of(self._integers_before))
            found.append(torch.ne(*both).sum(dtype=torch.float64))
        return found

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([buffer.numel() for buffer in self._floating])
        return [piece.view(b.shape) for piece, b in zip(pieces, self._floating, strict=True)]


def is_plain(buffer: torch.Tensor) -> bool:
    """Whether a buffer can be copied and added up; a sparse one is a constant."""
    return buffer.layout is torch.strided


def plain_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(filter(is_plain, model.buffers()))


@torch.no_grad()
def make_plain(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not is_plain(buffer):
                continue
            along = zip(buffer.shape, buffer.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in along) or buffer.is_inference():
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _kind(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _said(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    return 'None' if kind is None else f'one of {tuple(kind[0])} and {kind[1]}'


def _bytes_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


class Copies:
    """Copies tensors into others when it is called, all of the same types in one operation."""

    def __init__(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for one, other in zip(into, source, strict=True):
            groups.setdefault((one.dtype, other.dtype), []).append((one, other))
        self._groups = [tuple(map(list, zip(*pairs, strict=True))) for pairs in groups.values()]

    def __call__(self) -> None:
        for into, source in self._groups:
            torch._foreach_copy_(into, source)


def copy_all(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    Copies(into, source)()
