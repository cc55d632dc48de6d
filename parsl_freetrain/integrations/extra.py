"""What the integrations share: steps of a training, and what callbacks remember."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data.sample_order import samples_in
from parsl_freetrain.training.loop.changes import SCALARS
from parsl_freetrain.training.spec.training import TrainingSpec


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
        return spec.total_samples or samples_in(spec.total_epochs or 0, self.size)

    def check(self, total: int, wanted: int, who_says: str) -> None:
        """Raises BadInput if somebody wants another number of steps than the app."""
        if wanted != self.at(total):
            raise BadInput(
                f'The app trains {self.at(total)} steps of {self.batch} samples ({total} samples), '
                f'and {who_says}: state the same total in both.'
            )


class Memory:
    """The attributes of callbacks for the next fragment, whose callbacks are the same, in the same
    order, and some of a ``state``: numbers, texts, tensors, arrays, and containers of them. For
    ``ctx.keep``. Raises BadInput if a callback has another model than the trained one, which would
    be lost.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: torch.nn.Module,
        state: Any = None,
        names: Collection[str] = (),
    ) -> None:
        self._callbacks = {f'{i} {type(c).__name__}': c for i, c in enumerate(callbacks)}
        self._state, self._names = state, names
        for callback in callbacks:
            for name, value in vars(callback).items():
                if isinstance(value, torch.nn.Module) and value is not model:
                    raise BadInput(
                        f'The callback {type(callback).__name__} has a model of its own '
                        f'({name}), which would be lost at the end of a fragment: for a moving '
                        'average use ctx.ema.'
                    )

    def state_dict(self) -> dict[str, Any]:
        found = {f'.{name}': getattr(self._state, name) for name in self._names}
        for key, one in self._callbacks.items():
            plain = ((name, value) for name, value in vars(one).items() if _is_plain(value))
            found.update((f'{key}.{name}', value) for name, value in plain)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, value in state.items():
            key, _, name = path.partition('.')
            setattr(self._callbacks[key] if key else self._state, name, value)


def _is_plain(one: Any) -> bool:
    if type(one) in (dict, list, tuple):
        return all(map(_is_plain, [*one, *one.values()] if isinstance(one, dict) else one))
    if isinstance(one, torch.Tensor):
        return not one.requires_grad
    kind = getattr(one, 'dtype', np.dtype(object)).kind
    return type(one) in SCALARS or (isinstance(one, np.ndarray | np.generic) and kind in 'biufc')
