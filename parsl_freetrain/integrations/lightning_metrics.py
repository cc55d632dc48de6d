"""What a LightningModule collects over batches in fragments: torchmetrics, and lists."""

import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.integrations.lightning_arguments import unsupported
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.loop.changes import is_metric

_ARRAY = 'array of numpy'


class Metrics:
    """A module's metrics, empty for each batch, and the lists among its attributes. An evaluation
    joins what they got in its batches, in order.
    """

    def __init__(self, module: torch.nn.Module, peers: Peers) -> None:
        self._own = {name: one for name, one in module.named_modules() if is_metric(one)}
        self._module, self._peers = module, peers
        self._of_batches: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._trained: dict[str, Any] = {}
        self._lengths: dict[str, int] = {}

    def reset(self) -> None:
        for metric in self._own.values():
            if metric._update_count:
                metric.reset()

    def begin(self) -> None:
        """Call before a training step, or the steps of an evaluation."""
        self._lengths = {name: len(one) for name, one, *_ in self._lists()}

    def end_of_step(self) -> None:
        """Empty the metrics, and the lists to which a training step has appended its samples'."""
        for name, one, holder, key in self._lists():
            new = tree_leaves(one[self._lengths.get(name, 0) :])
            if any(isinstance(each, (float, torch.Tensor, np.ndarray)) for each in new):
                holder[key] = _Unknown(f'{type(self._module).__name__} reads {name}')
        self._trained |= {k: one for k, one in self._own.items() if one._update_count}
        self.reset()

    @contextmanager
    def unknown(self) -> Iterator[None]:
        """Meanwhile those that training steps have updated are not a number: they are empty."""
        before = [(one, one.compute) for one in self._trained.values()]
        for one, _ in before:
            one.compute = lambda: torch.tensor(math.nan)
        yield
        for one, compute in before:
            one.compute = compute

    def _lists(self) -> Iterator[tuple[str, list[Any], dict[Any, Any], Any]]:
        """By name, and where they are."""
        own = vars(self._module)
        for name, value in [*own.items()]:
            if type(value) is list:
                yield f'self.{name}', value, own, name
            elif isinstance(value, dict) and not name.startswith('_'):
                for key in [key for key, one in value.items() if type(one) is list]:
                    yield f'self.{name}[{key!r}]', value[key], value, key

    def take(self, number: int) -> None:
        """Put away what they hold of a batch."""
        metrics = {
            name: {k: [*v] if isinstance(v, list) else v for k, v in metric.metric_state.items()}
            for name, metric in self._own.items()
            if metric._update_count
        }
        lists = {}
        for name, one, *_ in self._lists():
            there = self._lengths.get(name, 0)
            if len(one) > there:
                lists[name] = tree_map(_sent, one[there:])
                del one[there:]
        self._of_batches[number] = metrics, lists
        self.reset()

    def unite(self) -> None:
        """Let them hold all batches of all ranks, as torchmetrics unites ranks. All call this."""
        packed, every = io.BytesIO(), dict[int, tuple[dict[str, Any], dict[str, Any]]]()
        torch.save(self._of_batches, packed)
        for said in gather_bytes(self._peers, packed.getvalue()):
            try:
                every |= torch.load(io.BytesIO(said), weights_only=True)
            except pickle.UnpicklingError as error:
                raise BadInput(
                    f'A list of {type(self._module).__name__}, to which an evaluation appends, has '
                    'something else in it than tensors, arrays, numbers, texts and containers of '
                    'them, which ranks can exchange: append only those.'
                ) from error
        batches = [every[number] for number in sorted(every)]
        here = {name: one for name, one, *_ in self._lists()}
        for name in dict.fromkeys(name for _, lists in batches for name in lists):
            if name in here:  # else a dict of this rank's has no such list, as it had no batch
                for _, lists in batches:
                    here[name] += tree_map(_received, lists.get(name, []), is_leaf=_is_array)
        for name, metric in self._own.items():
            states = [metrics[name] for metrics, _ in batches if name in metrics]
            for key, united in metric._reductions.items() if states else ():
                values = [state[key] for state in states]
                if isinstance(values[0], list):
                    setattr(metric, key, [one for value in values for one in value])
                else:
                    stacked = torch.stack(values)
                    setattr(metric, key, stacked if united is None else united(stacked))
            metric._update_count, metric._computed = len(states), None
        self._of_batches = {}


class _Unknown(list[Any]):
    """In place of a list to which training steps append. It stays empty: where C code reads it
    (``torch.stack``), an error or NaN comes of it.
    """

    def __init__(self, who: str) -> None:
        self._who = who

    def append(self, _: Any) -> None:
        pass

    def _refuse(self, *_: Any) -> Any:
        raise unsupported(
            f'{self._who}, to which training steps append; that',
            'each rank would have its own samples in it; for the mean over an epoch say '
            "self.log('name', value, on_epoch=True), and read trainer.callback_metrics['name']",
        )

    extend = append
    __iter__ = __getitem__ = _refuse


def _sent(one: Any) -> Any:
    if isinstance(one, np.ndarray):
        return {_ARRAY: torch.tensor(one)}
    return one.item() if isinstance(one, np.generic) else one


def _is_array(one: Any) -> bool:
    return isinstance(one, dict) and [*one] == [_ARRAY]


def _received(one: Any) -> Any:
    return one[_ARRAY].numpy() if _is_array(one) else one
