"""Budgets: the node-seconds that trainers have used, and the budgets that are spent.

A fragment uses all of its nodes from the decision that starts it until its last member has ended.
Times are those of events and decisions, so that a live run and its replay count the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from parsl_freetrain.core.allocation.constraints import EVERYBODY, keys_of
from parsl_freetrain.core.model.types import Trainer

INSTANT_S = 1e-6
"""A budget that would last for less than this number of seconds counts as spent, since times are
floats.
"""


@dataclass
class Meter:
    """The use of one budget, in node-seconds; ``used`` counts up to the time ``at``. ``noted``: the
    controller has stopped its trainers, which may take some time.
    """

    limit: float
    used: float
    nodes: int = 0
    at: float = -math.inf
    noted: bool = False

    def change(self, nodes: int, at: float) -> None:
        """Use ``nodes`` nodes more (or less, where negative) from now on."""
        self.used = self.used_at(at)
        self.at = max(self.at, at)
        self.nodes += nodes

    def used_at(self, at: float) -> float:
        return self.used + (self.nodes * max(at - self.at, 0.0) if self.nodes else 0.0)

    @property
    def spent_at(self) -> float:
        """When it will be spent if nothing changes; infinite: never."""
        left = max(self.limit - self.used, 0.0)
        if not left:
            return self.at
        return self.at + left / self.nodes if self.nodes else math.inf


class Budgets:
    """The budgets of a run.

    Parameters
    ----------
    limits
        Node-seconds by trainer, user or group; see
        :class:`~parsl_freetrain.core.controller.settings.ControllerSettings`.
    used_before
        Node-seconds that were used in earlier runs, by the same keys.
    """

    def __init__(self, limits: Mapping[str, float], used_before: Mapping[str, float]) -> None:
        self._meters = {
            key: Meter(limit, used_before.get(key, 0.0)) for key, limit in limits.items()
        }

    def __bool__(self) -> bool:
        return bool(self._meters)

    def change(self, trainer: Trainer, nodes: int, at: float) -> None:
        """Add this number of nodes to those that a trainer uses; negative: remove them."""
        for meter in self._of(trainer).values():
            meter.change(nodes, at)

    def used(self, key: str, at: float) -> float:
        """Node-seconds that have been used of a budget."""
        return self._meters[key].used_at(at)

    def next_spent(self) -> float:
        """When the next budget in use will be spent if nothing changes; infinite: never. Budgets of
        :meth:`note` are left out.
        """
        return min(
            (m.spent_at for m in self._meters.values() if m.nodes and not m.noted), default=math.inf
        )

    def note(self, at: float) -> None:
        """Note the budgets that are spent: their trainers are stopped now."""
        for meter in self._meters.values():
            if meter.limit - meter.used_at(at) <= meter.nodes * INSTANT_S:
                meter.noted = True

    def spent(self, trainer: Trainer, at: float, needed_node_s: float = 0.0) -> str:
        """The spent budget that stops the trainer, as a clause for a message; empty if there is
        none. ``needed_node_s``: minimum node-seconds for which a start is worthwhile.
        """
        for key, meter in self._of(trainer).items():
            used = meter.used_at(at)
            if meter.limit - used <= max(needed_node_s, meter.nodes * INSTANT_S):
                whose = 'all trainers' if key == EVERYBODY else key
                return (
                    f'the budget of {whose}, {meter.limit:.6g} node-seconds, is spent '
                    f'({used:.6g} used); raise it and run the program again to go on from the '
                    'last checkpoint'
                )
        return ''

    def _of(self, trainer: Trainer) -> dict[str, Meter]:
        return {key: self._meters[key] for key in keys_of(trainer) if key in self._meters}
