"""What the integrations share: steps of a training, and what callbacks remember."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data.sample_order import samples_in
from parsl_freetrain.training.loop.changes import SCALARS
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.spec.training import TrainingSpec

_ARRAYS = {torch.Tensor, np.ndarray}


@dataclass(frozen=True)
class StepCount:
    """Of the optimizer over a dataset of ``size`` samples, ``batch`` in each."""

    size: int
    batch: int

    @property
    def in_epoch(self) -> int:
        return math.ceil(self.size / self.batch)

    def at(self, samples: int) -> int:
        epochs, rest = divmod(samples, self.size)
        return epochs * self.in_epoch + math.ceil(rest / self.batch)

    def total_of(self, spec: TrainingSpec) -> int:
        if spec.total_samples is not None:
            return spec.total_samples
        assert spec.total_epochs is not None
        return samples_in(spec.total_epochs, self.size)

    def check(self, total: int, wanted: int, who_says: str) -> None:
        """Raises BadInput if somebody wants another number of steps than the app."""
        if wanted != self.at(total):
            raise BadInput(
                f'The app trains {self.at(total)} steps of {self.batch} samples ({total} samples), '
                f'and {who_says}: state the same total in both.'
            )


class Memory:
    """The attributes of callbacks for the next fragment, whose callbacks are the same, in the same
    order: plain ones (numbers, texts, and lists and dicts of them) in ``ctx.state[key]``, and
    tensors, arrays and containers of them as by ``ctx.keep``. Raises BadInput if one has another
    model than the trained one, which would be lost.
    """

    def __init__(
        self, ctx: FragmentContext, key: str, callbacks: Sequence[Any], model: torch.nn.Module
    ) -> None:
        self._ctx, self._key = ctx, key
        self._callbacks = {f'{i} {type(c).__name__}': c for i, c in enumerate(callbacks)}
        for callback in callbacks:
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value is not model:
                    raise BadInput(
                        f'The callback {type(callback).__name__} has a model of its own '
                        f'({name}), which would be lost at the end of a fragment: for a moving '
                        'average use ctx.ema.'
                    )

    def begin(self) -> None:
        """Call once after callbacks have begun."""
        self._ctx.keep(self, self._key)

    def state_dict(self) -> dict[str, Any]:
        return {
            f'{key}.{name}': value
            for key, one in self._callbacks.items()
            for name, value in vars(one).items()
            if _has_tensors(value)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, value in state.items():
            key, _, name = path.partition('.')
            setattr(self._callbacks[key], name, value)

    def restore(self) -> dict[str, Any]:
        """Returns what else was kept."""
        kept = copy.deepcopy(self._ctx.state.get(self._key, {}))
        for name, attributes in kept.get('callbacks', {}).items():
            for attribute, value in attributes.items():
                old = getattr(self._callbacks[name], attribute, None)
                if isinstance(old, torch.Tensor):
                    value = torch.tensor(value, dtype=old.dtype)
                setattr(self._callbacks[name], attribute, value)
        return dict(kept.get('more', {}))

    def keep(self, more: Mapping[str, Any]) -> None:
        """The attributes as they are now, and more plain values."""
        callbacks = {name: _plain(vars(one)) for name, one in self._callbacks.items()}
        self._ctx.state[self._key] = {'callbacks': callbacks, 'more': _plain(more)}


def _has_tensors(value: Any) -> bool:
    leaves = {*map(type, tree_leaves(value))}
    return bool(leaves & _ARRAYS) and leaves <= _ARRAYS | {*SCALARS}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        number = value.item() if getattr(value, 'ndim', None) == 0 else value
        try:
            if (kept := json.loads(json.dumps(number))) == number:
                found[name] = kept  # which does not change when the value does
        except (TypeError, ValueError):
            continue  # it is not plain
    return found
