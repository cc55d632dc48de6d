"""Adasum combines the gradients of several ranks: where they agree they are averaged, where they
differ they are added.

For two gradients a and b of one tensor::

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

with coefficient 1 where a gradient is zero (Maleki et al. 2020, arXiv 2006.02924): orthogonal
gradients are added, equal ones averaged, opposite ones vanish. More than two ranks combine theirs
tensor by tensor along a fixed binary tree, as the rule is not associative: of 2^k ranks neighbours
first, then pairs of them, and so on; those from 2^k on are paired with ranks 0, 1, ... before.
"""

from collections.abc import Callable, Sequence

import torch


def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Adasum of two gradients of one tensor, of any type; dot products in double precision."""
    x, y = (t if t.dtype in (torch.float32, torch.float64) else t.float() for t in (a, b))
    dot, one, other = ((p * q).sum(dtype=torch.float64) for p, q in ((x, y), (x, x), (y, y)))
    # No value is read on the CPU, so nothing waits for a GPU.
    scales = (
        torch.where(norm == 0, 1.0, 1 - dot / (2 * norm)).to(x.dtype) for norm in (one, other)
    )
    first, second = scales
    return (first * x + second * y).to(a.dtype)


def pair_all(a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """As :func:`pair` for flat rows of several tensors of these sizes."""
    rows = zip(a.split(list(sizes)), b.split(list(sizes)), strict=True)
    return torch.cat([pair(x, y) for x, y in rows])


def combine(
    own: torch.Tensor,
    sizes: Sequence[int],
    rank: int,
    world_size: int,
    sendrecv: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Adasum over all ranks, which all get the same. ``own``: this rank's gradients, flat, of
    tensors with ``sizes`` elements. ``sendrecv`` swaps rows with a rank, in log2(n) rounds, or two
    more.
    """
    core = 1 << (world_size.bit_length() - 1)
    if rank >= core:
        sendrecv(own, rank - core)
        return sendrecv(own, rank - core)
    extra = rank + core if rank + core < world_size else None
    if extra is not None:
        own = pair_all(own, sendrecv(own, extra), sizes)
    distance = 1
    while distance < core:
        partner = rank ^ distance
        other = sendrecv(own, partner)
        # In the same order on both, so that both get the same bits.
        own = pair_all(own, other, sizes) if rank < partner else pair_all(other, own, sizes)
        distance *= 2
    if extra is not None:
        sendrecv(own, extra)
    return own
