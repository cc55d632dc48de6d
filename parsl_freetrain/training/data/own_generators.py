"""Random number generators of the user's own, in datasets, samplers, functions and variables."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parsl_freetrain.training.data.inside import inside


class OwnGenerators:
    """Those of this process, by where they were found; seeded wherever torch's own generator is."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any, Callable[[int], object]]] = {}

    def find(self, where: Mapping[str, Any]) -> list[str]:
        new = []
        for name, value in inside(where):
            seed = seeding(value)
            if seed is not None and id(value) not in self._known:
                self._known[id(value)] = name, value, seed
                new.append(name)
        return new

    def seed(self, seed: int) -> None:
        for name, _, seed_it in self._known.values():
            seed_it(seed_of(f'{seed}:{name}'))

    def forget(self) -> None:
        self._known.clear()


own_generators = OwnGenerators()


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seeding(value: Any) -> Callable[[int], object] | None:
    """How it is seeded; None: it is no generator, or one that :func:`seed_everything` seeds."""
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else value.manual_seed
    if isinstance(value, random.Random):
        shared = value is getattr(random, '_inst', None) or isinstance(value, random.SystemRandom)
        return None if shared else value.seed
    numpy = sys.modules.get('numpy.random')
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator

        def seed_bits(seed: int) -> None:
            bits.state = type(bits)(seed).state

        return seed_bits
    if isinstance(value, numpy.RandomState) and value is not numpy.mtrand._rand:
        return lambda seed: value.seed(seed % 2**32)
    return None
