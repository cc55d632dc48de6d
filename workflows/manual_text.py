"""Python's own manual, of ``help()``, as a text to learn letter by letter."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset


def manual() -> tuple[Tensor, str]:
    """The letters of the manual as numbers, and which letters there are."""
    text = '\n\n'.join(topics[name] for name in sorted(topics))
    letters = ''.join(sorted(set(text)))
    number_of = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([number_of[letter] for letter in text], dtype=torch.uint8), letters


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of a text, each with the same piece shifted by one letter."""

    def __init__(self, numbers: Tensor, length: int) -> None:
        self.numbers, self.length = numbers, length

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.numbers[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]
