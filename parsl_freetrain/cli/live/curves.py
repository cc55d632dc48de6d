"""The metrics of the live page, followed in the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.kept_metrics import KeptMetrics, MetricPoint, began_in
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.report.metrics import curves_of, thinned

MOST_TRAINERS = 8
MOST_METRICS = 12
MOST_POINTS = 200


class LiveCurves:
    """The curves of the trainers of a run, up to now. What it has read is not read again."""

    def __init__(
        self, reader: Reader, run: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._reader, self._run, self._clock = reader, run, clock
        self._kept: dict[str, tuple[KeptMetrics, list[MetricPoint]]] = {}

    def document(self) -> dict[str, Any]:
        """By metric and trainer, points as [samples, epochs or null, seconds, value]. Trainers and
        metrics beyond the first are left out.
        """
        history = self._reader.history()
        runs = [run.id for run in history.runs if run.name.startswith(self._run or '')]
        rows = [row for row in history.trainers if runs and row.run == runs[-1]][:MOST_TRAINERS]
        points: dict[str, list[MetricPoint]] = {}
        for row in rows:
            if row.name not in self._kept:
                began = began_in(history, row.name, row.run)
                self._kept[row.name] = KeptMetrics(row.name, began), []
            metrics, known = self._kept[row.name]
            known += metrics.new(self._reader)
            points[row.name] = [*known, *metrics.rest()]
        found = curves_of(points, {row.name: row for row in rows}, Clock(history, self._clock()))
        return {
            metric: {
                name: [astuple(point) for point in thinned(curve, MOST_POINTS)]
                for name, curve in found[metric].items()
            }
            for metric in list(found)[:MOST_METRICS]
        }
