"""Loading of batches for an accelerator. There is none here, so what torch does with one is
replaced; ``make gpu`` has the same test with a real one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parsl_freetrain.training.data.loader import MicroBatch, make_loader, to_device

CPU, GPU = torch.device('cpu'), torch.device('cuda', 0)


@pytest.mark.parametrize(('device', 'locked'), [(GPU, 2), (CPU, 0)], ids=['gpu', 'cpu'])
def test_batches_for_an_accelerator_are_page_locked_and_their_copies_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, locked: int
) -> None:
    pinned: list[int] = []
    copied: list[tuple[Any, Any]] = []

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    def copy(tensor: torch.Tensor, to: torch.device, *, non_blocking: bool) -> torch.Tensor:
        copied.append((tensor.data_ptr(), non_blocking))
        return tensor

    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True)
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda: GPU)
    monkeypatch.setattr(torch.Tensor, 'pin_memory', pin_memory)
    monkeypatch.setattr(torch.Tensor, 'to', copy)
    turns = [MicroBatch((0, 1), 0, 0, 1.0), MicroBatch((2, 3), 2, 0, 1.0)]
    data = list(torch.arange(4.0))
    batches = list(make_loader(data, turns, 7, None, 0, device))
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0]]
    assert pinned == [batch.data_ptr() for batch in batches][:locked]
    to_device({'x': [batches[0]], 'y': (batches[1], 'text')}, device)
    assert copied == [(batch.data_ptr(), True) for batch in batches]
