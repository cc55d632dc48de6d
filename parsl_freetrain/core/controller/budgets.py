"""Budgets: node-seconds of trainers, from decision to end, and what blocks are charged."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parsl_freetrain.core.allocation.constraints import EVERYBODY, keys_of
from parsl_freetrain.core.model.errors import nodes_text
from parsl_freetrain.core.model.types import BlockRequest, Hole, Trainer

INSTANT_S = 1e-6  # a budget that would last for fewer seconds counts as spent: times are floats


@dataclass
class Meter:
    """Node-seconds of a budget used up to ``at``; ``noted``: its trainers are being stopped."""

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
    """A run's budgets and what earlier runs used of them, by trainer, user or group."""

    def __init__(self, limits: Mapping[str, float], used_before: Mapping[str, float]) -> None:
        used = used_before.get
        self._meters = {key: Meter(limit, used(key, 0.0)) for key, limit in limits.items()}

    def __bool__(self) -> bool:
        return bool(self._meters)

    def change(self, trainer: Trainer, nodes: int, at: float) -> None:
        for meter in self._of(trainer).values():
            meter.change(nodes, at)

    def next_spent(self) -> float:
        """When the next budget not noted is spent if nothing changes, or infinity."""
        used = [m.spent_at for m in self._meters.values() if m.nodes and not m.noted]
        return min(used, default=math.inf)

    def note(self, at: float) -> None:
        for meter in self._meters.values():
            if meter.limit - meter.used_at(at) <= meter.nodes * INSTANT_S:
                meter.noted = True

    def spent(self, trainer: Trainer, at: float, needed_node_s: float = 0.0) -> str:
        """The spent budget that stops the trainer, as a clause, or ''; a start needs so much."""
        for key, meter in self._of(trainer).items():
            used = meter.used_at(at)
            if meter.limit - used <= max(needed_node_s, meter.nodes * INSTANT_S):
                whose = 'all trainers' if key == EVERYBODY else key
                return (
                    f'the budget of {whose}, {meter.limit:.6g} node-seconds, is spent ({used:.6g} '
                    'used); raise it and run the program again to go on from the last checkpoint'
                )
        return ''

    def _of(self, trainer: Trainer) -> dict[str, Meter]:
        return {key: self._meters[key] for key in keys_of(trainer) if key in self._meters}


class Charges:
    """What accounts are charged for blocks: an open one counts with all that it can cost."""

    def __init__(self, limit: float | None, before: float) -> None:
        self.limit = math.inf if limit is None else limit
        self.charged = before

    def ended(self, request: BlockRequest, begun_s: float | None, at: float) -> None:
        """A block is over, or waits in the queue again; ``begun_s``: None if it had no nodes."""
        if begun_s is not None:
            lasted_s = min(max(at - begun_s, 0.0), request.lasts_s)
            self.charged += request.charge.cost(request.nodes, lasted_s)

    def left(self, open_blocks: Iterable[BlockRequest]) -> float:
        if self.limit == math.inf:
            return math.inf
        may_cost = sum(block.charge.cost(block.nodes, block.lasts_s) for block in open_blocks)
        return self.limit - self.charged - may_cost

    def too_dear(self, holes: Iterable[Hole], least: float, at: float) -> str:
        """Why no block of ``least`` nodes in these (long) holes can be paid, as a clause, or ''."""
        lasting = ((hole, hole.lasts_s(at)) for hole in holes if hole.nodes >= least)
        costs = [(hole.charge.cost(int(least), lasts_s), lasts_s) for hole, lasts_s in lasting]
        if self.limit == math.inf or not costs or self.limit - self.charged >= min(costs)[0]:
            return ''
        cost, lasts_s = min(costs)
        return (
            f'{self.charged:.6g} of charge_budget={self.limit:.6g} are charged, and the cheapest '
            f'block that can be had ({nodes_text(int(least))} for {lasts_s:.0f} s) may cost '
            f'{cost:.6g}; raise the budget, or make blocks shorter (longest_s), and run the '
            'program again to go on from the last checkpoint'
        )


def affordable(hole: Hole, left: float, at: float) -> int:
    each = hole.charge.cost(1, hole.lasts_s(at))
    if each <= 0 or left == math.inf or hole.nodes * each <= left:
        return hole.nodes
    # A little more than is left is no more than an error of floats.
    return math.floor(left / each + 1e-9) if left > 0 else 0
