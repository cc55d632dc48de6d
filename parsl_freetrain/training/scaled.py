"""Scaled mode: a global batch that grows with the ranks, and what the learning rate has to do with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parsl_freetrain.core.errors import BadInput

MEAN, ADASUM = 'mean', 'adasum'
_RULES = ('linear', 'sqrt', 'none')


@dataclass(frozen=True)
class Scaled:
    """How training changes with the number of ranks in ``mode='scaled'``.

    Attributes
    ----------
    reference_ranks
        The number of ranks at which ``batch_size`` and the learning rate are as the function states them. With n ranks the global
        batch has ``batch_size / reference_ranks * n`` samples.
    lr
        What the learning rate is multiplied by with n ranks: n / reference_ranks ('linear'), its square root ('sqrt'), or 1 ('none').
        Default: 'linear' with ``combine='mean'``, 'none' with 'adasum', which allows nothing else.
    warmup_samples
        The factor grows linearly from 1 to its full size over so many samples from the beginning of the training; a factor below 1
        holds from the beginning.
    combine
        How the ranks' gradients become one: 'mean' over the samples, or 'adasum'.

    Raises
    ------
    BadInput
        If one of these is not as described.

    Notes
    -----
    Linear scaling with warm-up: Goyal et al. 2017 (arXiv 1706.02677); linear and square root for a segmentation network on up to 2,048
    nodes: Dong et al. 2019 (arXiv 1905.06236); Adasum: Maleki et al. 2020 (arXiv 2006.02924).
    """

    reference_ranks: int = 1
    lr: str | None = None
    warmup_samples: int = 0
    combine: str = MEAN

    def __post_init__(self) -> None:
        if self.reference_ranks < 1:
            raise BadInput(f'Scaled: reference_ranks is {self.reference_ranks}; it must be at least 1.')
        if self.warmup_samples < 0:
            raise BadInput(f'Scaled: warmup_samples is {self.warmup_samples}; it must be 0 or more.')
        if self.combine not in (MEAN, ADASUM):
            raise BadInput(f'Scaled: combine is {self.combine!r}; it must be {MEAN!r} or {ADASUM!r}.')
        if self.lr is not None and self.lr not in _RULES:
            raise BadInput(f'Scaled: lr is {self.lr!r}; it must be one of {", ".join(map(repr, _RULES))}.')
        if self.combine == ADASUM and self.lr not in (None, 'none'):
            raise BadInput(f"Scaled: lr is {self.lr!r} with combine='adasum', which scales the step by itself; leave lr out.")

    def batch_size(self, stated: int, world_size: int) -> int:
        """Samples of a global batch of ``world_size`` ranks, where the function states ``stated`` for the reference.

        Raises
        ------
        BadInput
            If the reference ranks cannot share the stated batch evenly.
        """
        each, left = divmod(stated, self.reference_ranks)
        if left:
            raise BadInput(f'In scaled mode each rank gets batch_size / reference_ranks samples, but {stated} is no multiple of '
                           f'{self.reference_ranks}: state a batch_size that is.')
        return each * world_size

    def lr_factor(self, world_size: int, samples: int) -> float:
        """What the learning rate is multiplied by in a batch before which ``samples`` samples have been seen."""
        ratio = world_size / self.reference_ranks
        rule = self.lr or ('none' if self.combine == ADASUM else 'linear')
        full = {'linear': ratio, 'sqrt': math.sqrt(ratio), 'none': 1.0}[rule]
        if full <= 1 or samples >= self.warmup_samples:
            return full
        return 1 + (full - 1) * samples / self.warmup_samples
