"""A batch cut into micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor


class MicroBatches:
    """The parts of a batch, and the loss as far as it is known.

    Parameters
    ----------
    inputs, targets
        Of shapes (samples, ...), at least one sample.
    number
        Of parts; their sizes differ by at most 1. Where there are fewer samples, some are repeated with weight 0.
    device
        Where the loss is.

    Attributes
    ----------
    inputs, targets
        By micro-batch.
    weights
        By micro-batch: the share of the batch's samples that it has; the losses of micro-batches, which are means, are added up with these.
    loss
        The sum so far.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, number: int, device: torch.device) -> None:
        samples = len(inputs)
        parts = torch.arange(max(samples, number), device=inputs.device).tensor_split(number)
        self.inputs, self.targets = ([values[part % samples] for part in parts] for values in (inputs, targets))
        self.weights = [int((part < samples).sum()) / samples for part in parts]
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
