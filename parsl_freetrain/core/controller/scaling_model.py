"""A model of how a network scales: few parameters, fitted to noisy measurements.

The speed-up of n nodes over one follows the Universal Scalability Law (N. J. Gunther, Guerrilla
Capacity Planning, 2007),

    s(n) = n / (1 + sigma (n - 1) + kappa n (n - 1)),

with sigma for the work that is not divided (Amdahl's law is kappa = 0) and kappa for what grows
with every pair of nodes, so that the speed falls again beyond some count. Both are unknown. Each
pair on a grid gets a probability from the measurements, by Bayes' rule: nothing is iterated, and
what is not known stays in the answer as a spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SIGMA = np.concatenate([[0.0], np.logspace(-3.5, 0.0, 15)])
KAPPA = np.concatenate([[0.0], np.logspace(-6.0, -1.5, 13)])
_SIGMA, _KAPPA = (grid.ravel() for grid in np.meshgrid(SIGMA, KAPPA, indexing='ij'))
# Standard deviations of the logarithm of a rate: of one measurement, and of the model itself.
NOISE, MISFIT = 0.1, 0.04


def shapes(nodes: Sequence[int]) -> Floats:
    """Logarithms of the speed-ups at these counts, shape (parameters, counts)."""
    n = np.asarray(nodes, dtype=np.float64)
    lost = _SIGMA[:, None] * (n - 1) + _KAPPA[:, None] * n * (n - 1)
    logs: Floats = np.log(n) - np.log1p(lost)
    return logs


class Evidence:
    """What the measurements of one trainer say: node count, typical rate in samples per second, and
    number of measurements.

    By pair of parameters, ``likelihood`` has the logarithm of it up to a constant, ``one_node``
    that of the rate on one node that fits best.
    """

    def __init__(self, measured: Iterable[tuple[int, float, int]]) -> None:
        nodes, rates, times = zip(*measured, strict=True)
        weight = 1 / (NOISE**2 / np.array(times) + MISFIT**2)
        rest = np.log(rates) - shapes(nodes)
        self.one_node: Floats = rest @ weight / weight.sum()
        self.likelihood: Floats = -0.5 * (rest - self.one_node[:, None]) ** 2 @ weight


def _prior() -> Floats:
    """Log probability of each pair before a measurement: all magnitudes alike, early falls less."""
    peak = np.sqrt((1 - np.minimum(_SIGMA, 1)) / np.maximum(_KAPPA, 1e-12))
    logs: Floats = -np.log1p(8 / np.maximum(peak, 1.0))
    return logs


PRIOR = _prior()


class Posterior:
    """A trainer's rates, from its ``own`` evidence, that of trainers of the same function
    (``related``), or the assumed ``one_node``.
    """

    def __init__(self, own: Evidence | None, related: Sequence[Evidence], one_node: float) -> None:
        # All related trainers together count as one: their networks may differ in details.
        others = sum((e.likelihood for e in related), np.zeros_like(PRIOR))
        logs = PRIOR + others / max(len(related), 1)
        if own is not None:
            logs = logs + own.likelihood
        self._share: Floats = np.exp(logs - logs.max())
        self._share /= self._share.sum()
        if own is not None:
            self._start = own.one_node
        elif related:
            self._start = np.mean([e.one_node for e in related], axis=0)
        else:
            self._start = np.full(len(logs), math.log(one_node))

    def rates(self, counts: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of the rate at each count."""
        rates = self._start[:, None] + shapes(counts)
        mean: Floats = self._share @ rates
        return mean, np.sqrt(np.maximum(self._share @ (rates - mean) ** 2, 0.0))


def points(max_nodes: int) -> list[int]:
    """Node counts at which a curve is computed: all small ones, then in steps of about a tenth."""
    found = {*range(1, min(max_nodes, 16) + 1), max_nodes}
    n = 16.0
    while n < max_nodes:
        n *= 1.1
        found.add(min(round(n), max_nodes))
    return sorted(found)
