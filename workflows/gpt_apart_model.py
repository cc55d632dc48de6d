"""The network of ``workflows/gpt_apart.py``, its text, and its training. Ranks import this module
and not the workflow, which takes longer than a piece of a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workflows.manual_text import Windows, manual

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext

UNSEEN = 64  # windows of text for the test


class Gpt(nn.Module):
    """(samples, length) letters to (samples, length, letters) scores of the following ones."""

    def __init__(self, letters: int, length: int, width: int, blocks: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, activation='gelu', batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Any:
        length = x.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        embedded = self.letter(x) + self.place(torch.arange(length, device=x.device))
        return self.head(self.norm(self.blocks(embedded, later, is_causal=True)))


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def train_gpt(
    ctx: FragmentContext, width: int, blocks: int, length: int, batch_size: int
) -> dict[str, float]:
    """Train; returns the loss on text that was not trained."""
    numbers, letters = manual()
    test = length * UNSEEN + 1
    net: Any = Gpt(len(letters), length, width, blocks)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98))
    net, optimizer = ctx.prepare(net, optimizer, clip_grad_norm=1.0)
    for given, following in ctx.loop(Windows(numbers[:-test], length), batch_size, drop_last=True):
        optimizer.zero_grad()
        loss = loss_of(net(given), following)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
    net.eval()
    unseen = Windows(numbers[-test:], length)
    given, following = map(torch.stack, zip(*(unseen[i] for i in range(UNSEEN)), strict=True))
    with torch.no_grad():
        return {'loss': float(loss_of(net(given), following))}
