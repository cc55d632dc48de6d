"""Measurements of speeds in a replay whose controller does not know the scaling curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import Count, PositiveSeconds, Share
from parsl_freetrain.replay.accounting import RecordedJob


class CurveLearning(Settings, frozen=True, kw_only=True):
    """How curves are learned that the controller is not told."""

    noise: Share = 0.0  #: standard deviation of the logarithm of a measured rate
    #: a fragment's speed is measured after so long, then twice, four times ...
    measure_s: PositiveSeconds = 10.0
    seed: Count = 0  #: of the noise


class Measuring:
    def __init__(self, learning: CurveLearning) -> None:
        self._learning = learning
        self._random = np.random.default_rng(learning.seed)
        self._due: list[tuple[float, str, int, float]] = []

    def begin(self, run: RecordedJob) -> None:
        wait_s = self._learning.measure_s
        heappush(self._due, (run.started_s + wait_s, run.trainer.name, run.fragment, wait_s))

    def next_s(self, runs: Mapping[str, RecordedJob]) -> float:
        while self._due:
            at, name, fragment, _ = self._due[0]
            if runs[name].nodes and runs[name].fragment == fragment:
                return at
            heappop(self._due)
        return math.inf

    def due(self, at: float, runs: Mapping[str, RecordedJob]) -> list[ev.Event]:
        events: list[ev.Event] = []
        while self.next_s(runs) <= at:
            _, name, fragment, wait_s = heappop(self._due)
            run = runs[name]
            heappush(self._due, (at + wait_s, name, fragment, 2 * wait_s))
            factor = math.exp(self._learning.noise * self._random.standard_normal())
            samples = max(int(run.samples + run.rate * (at - run.since)), 0)
            rate = run.rate * factor
            events.append(ev.FragmentProgressed(at, name, fragment, samples, rate))
        return events
