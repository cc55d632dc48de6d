"""Objects of torchmetrics in a LightningModule in fragments."""

from __future__ import annotations

import io
from typing import Any, TypeGuard

import torch

from parsl_freetrain.training.comm.peers import Peers, gather_bytes


class Metrics:
    """A module's metrics, empty for each batch; an evaluation joins batches in order."""

    def __init__(self, module: torch.nn.Module, peers: Peers) -> None:
        self._own = {name: one for name, one in module.named_modules() if is_metric(one)}
        self._peers = peers
        self._of_batches: dict[int, dict[str, dict[str, Any]]] = {}

    def reset(self) -> None:
        for metric in self._own.values():
            if metric._update_count:
                metric.reset()

    def take(self, number: int) -> None:
        """Put away what they hold of a batch."""
        self._of_batches[number] = {
            name: {k: [*v] if isinstance(v, list) else v for k, v in metric.metric_state.items()}
            for name, metric in self._own.items()
            if metric._update_count
        }
        self.reset()

    def unite(self) -> None:
        """Let them hold all batches of all ranks, as torchmetrics unites ranks. All call this."""
        if not self._own:
            return
        packed = io.BytesIO()
        torch.save(self._of_batches, packed)
        every: dict[int, dict[str, Any]] = {}
        device = next(iter(self._own.values())).device
        for one in gather_bytes(self._peers, packed.getvalue()):
            every |= torch.load(io.BytesIO(one), map_location=device, weights_only=True)
        for name, metric in self._own.items():
            states = [every[number][name] for number in sorted(every) if name in every[number]]
            for key, united in metric._reductions.items() if states else ():
                values = [state[key] for state in states]
                if isinstance(values[0], list):
                    setattr(metric, key, [one for value in values for one in value])
                else:
                    stacked = torch.stack(values)
                    setattr(metric, key, stacked if united is None else united(stacked))
            metric._update_count, metric._computed = len(states), None
        self._of_batches = {}


def is_metric(thing: Any) -> TypeGuard[Any]:
    return any(
        kind.__name__ == 'Metric' and kind.__module__.startswith('torchmetrics')
        for kind in type(thing).__mro__
    )
