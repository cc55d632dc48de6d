"""A logger of metrics that remembers what it is given."""

from __future__ import annotations

from collections.abc import Mapping

from parsl_freetrain.integrations.metric_logger import LoggedTraining


class Recorder:
    """A logger as users can write them; fails as often as it is told."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.opened: list[LoggedTraining] = []
        self.points: list[tuple[str, int, Mapping[str, float]]] = []
        self.states: list[str] = []

    def open(self, training: LoggedTraining) -> _Recorded:
        self.opened.append(training)
        return _Recorded(self, training.trainer)


class _Recorded:
    def __init__(self, to: Recorder, trainer: str) -> None:
        self._to, self._trainer = to, trainer

    def log(self, samples: int, at: float, metrics: Mapping[str, float]) -> None:
        if self._to.fails and samples == 20:
            self._to.fails -= 1
            raise ConnectionError('no server')
        self._to.points.append((self._trainer, samples, metrics))

    def close(self, state: str) -> None:
        self._to.states.append(state)
