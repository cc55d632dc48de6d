"""Two small networks for scikit-learn's handwritten digits, as freetrain functions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train_digits(
    ctx: FragmentContext,
    network: str,
    images: Tensor,
    labels: Tensor,
    test_images: Tensor,
    test_labels: Tensor,
    step_s: float = 0.0,
) -> None:
    """Train one of the networks and report its accuracy on the test images.

    Parameters
    ----------
    images, test_images
        Float tensors of shape (samples, 1, 8, 8), values 0 to 1.
    labels, test_labels
        Integer tensors of shape (samples,).
    step_s
        Additional seconds for each step, for a longer training.
    """
    torch.manual_seed(1)
    model = cnn() if network == 'cnn' else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in ctx.loop(TensorDataset(images, labels), batch_size=32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
        time.sleep(step_s)
    model.eval()
    with torch.no_grad():
        ctx.report(accuracy=(model(test_images).argmax(1) == test_labels).float().mean().item())
