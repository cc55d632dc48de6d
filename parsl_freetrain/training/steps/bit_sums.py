"""Sums of the bits of tensors: equal tensors have equal sums, wherever their elements lie."""

from collections.abc import Sequence
from itertools import accumulate

import torch

_SMALL = 1 << 16  # elements; smaller tensors are put together
_SIGNED_ZERO = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
MODULO = (1 << 32) - 1  # a mask: sums of sums need it, too


@torch.no_grad()
def bit_sums(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """By tensor, the sum of the bits of its elements as integers, modulo 2^32 (None: 0; -0.0 as
    0.0): the same in any order and however it is divided. Few operations together; nothing is read.
    """
    found: list[torch.Tensor] = [torch.zeros((), dtype=torch.int64, device=device)] * len(tensors)
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    plain = [None if tensor is None else as_plain(tensor) for tensor in tensors]
    for i, tensor in enumerate(plain):
        if tensor is not None and tensor.numel() > _SMALL:
            found[i] = _sum(_bits(tensor)).to(device)
        elif tensor is not None and tensor.numel():
            small.setdefault((tensor.dtype, tensor.device), []).append(i)
    for (_, where), places in small.items():
        rows = [plain[i].reshape(-1) for i in places]  # type: ignore[union-attr]
        bits = _bits(torch.cat(rows))
        each = bits.numel() // sum(map(len, rows))  # an element may have two numbers
        ends = torch.tensor([each * end for end in accumulate(map(len, rows))], device=where)
        upto = bits.cumsum(0, dtype=torch.int64)[ends - 1]
        sums = torch.cat([upto[:1], upto.diff()])
        for i, one in zip(places, sums.to(device).unbind(), strict=True):
            found[i] = one
    return (
        torch.stack(found) & MODULO if found else torch.zeros(0, dtype=torch.int64, device=device)
    )


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _SIGNED_ZERO:
        tensor = tensor + 0.0
    if tensor.element_size() == 8:
        tensor = tensor.contiguous()
    return tensor.view(_INTEGERS[tensor.element_size()])


def _sum(bits: torch.Tensor) -> torch.Tensor:
    """Modulo 2^32. On a CPU, a sum of another type than that of its numbers is slow."""
    if bits.dtype is torch.int32 and bits.device.type == 'cpu' and bits.is_contiguous():
        words = bits.view(-1)
        if words.numel() % 2 == 0:
            words = words.view(torch.int64)
            return words.sum() + (words >> 32).sum()
    return bits.sum(dtype=torch.int64)
