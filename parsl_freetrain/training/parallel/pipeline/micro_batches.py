"""A batch cut into micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


class MicroBatches:
    """The parts of a batch of at least one sample, and the sum of their losses so far. Their sizes
    differ by at most 1; of too few samples, some are repeated with weight 0. ``weights``: shares of
    the batch's samples, with which the losses of micro-batches (means) are added.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, number: int, device: torch.device) -> None:
        samples = len(inputs)
        parts = torch.arange(max(samples, number), device=inputs.device).tensor_split(number)
        self.inputs, self.targets = (
            [values[part % samples] for part in parts] for values in (inputs, targets)
        )
        self.weights = [int((part < samples).sum()) / samples for part in parts]
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
