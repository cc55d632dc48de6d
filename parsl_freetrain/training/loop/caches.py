"""Results that the user's functions cache (``functools.lru_cache``): no checkpoint holds them."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from functools import _lru_cache_wrapper
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.flatten import same
from parsl_freetrain.training.data.own_generators import as_before, own_generators


class Caches:
    """Those that there are where a loop begins; what its body adds to them is looked at."""

    def __init__(self, caches: Sequence[_lru_cache_wrapper[Any]]) -> None:
        self._misses = {one: one.cache_info().misses for one in caches}
        self._first = dict[Any, tuple[Any, ...]]()  # arguments

    def look(self) -> None:
        """Raises BadInput if a function says something else for the first or the last arguments
        that are new than what it has cached: a new fragment begins without it, and each rank has
        its own.
        """
        for one, misses in self._misses.items():
            if one.cache_info().misses > misses and (last := _last_arguments(one)) is not None:
                for args in {self._first.setdefault(one, last), last}:
                    _compare(one, args)


def _compare(one: _lru_cache_wrapper[Any], args: tuple[Any, ...]) -> None:
    cached, again = tree_leaves(one(*args)), []
    plain = torch.Tensor, np.ndarray, bool, int, float, str
    if not all(isinstance(leaf, plain) for leaf in cached):
        return  # such as a model, which takes long to make
    with suppress(Exception), as_before(own_generators):
        again = tree_leaves(one.__wrapped__(*args))
    listed = [
        [x.tolist() if isinstance(x, np.ndarray) else x for x in its] for its in (cached, again)
    ]
    if again and not same(*listed):
        raise BadInput(
            f'The function {one.__wrapped__.__qualname__} caches its results (lru_cache), and says '
            'something else when it is called again with the same arguments, as of random numbers '
            'or weights: a fragment begins with an empty cache, and each rank has its own, so the '
            'result would depend on the nodes. Leave the cache out, or keep the results in a '
            'variable.'
        )


def _last_arguments(one: _lru_cache_wrapper[Any]) -> tuple[Any, ...] | None:
    """Those of its newest entry; None: they have names, which are not known here."""
    entries = (d for d in gc.get_referents(one) if type(d) is dict and '__wrapped__' not in d)
    key = next(reversed(next(entries, {})), None)
    args = key if isinstance(key, tuple) else (key,)
    if one.cache_parameters()['typed']:
        args = args[: len(args) // 2]  # their types follow
    return None if any(type(arg) is object for arg in args) else args
