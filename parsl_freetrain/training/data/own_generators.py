"""Random number generators of the user's own, in datasets, samplers, functions and variables."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
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

    def __iter__(self) -> Iterator[Any]:
        return (one for _, one, _ in self._known.values())


own_generators = OwnGenerators()


@contextmanager
def as_before(
    own: Iterable[Any] = (), devices: Iterable[torch.device] | None = None
) -> Iterator[None]:
    """Whatever is drawn or seeded within, afterwards random numbers go on as before: torch's (None:
    of all devices), those of ``random`` and numpy, and those of some generators.
    """
    before = [(one, _state_of(one)) for one in (random, np.random, *own)]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for one, state in before:
            _set_state(one, state)


def _state_of(one: Any) -> Any:
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    return one.get_state() if hasattr(one, 'get_state') else one.getstate()


def _set_state(one: Any, state: Any) -> None:
    if isinstance(one, np.random.Generator):
        one.bit_generator.state = state
    else:
        (one.set_state if hasattr(one, 'set_state') else one.setstate)(state)


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seeding(value: Any) -> Callable[[int], object] | None:
    """How it is seeded; None: it is no generator, or one that :func:`seed_everything` seeds."""
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else value.manual_seed
    if isinstance(value, random.Random):
        shared = value is getattr(random, '_inst', None) or isinstance(value, random.SystemRandom)
        return None if shared else value.seed
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda seed: setattr(bits, 'state', type(bits)(seed).state)
    if isinstance(value, np.random.RandomState) and value is not np.random.mtrand._rand:
        return lambda seed: value.seed(seed % 2**32)
    return None
