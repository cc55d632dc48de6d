"""The charts of the live page."""

from __future__ import annotations

from parsl_freetrain.cli.live.view import LiveView
from parsl_freetrain.report.figures import figures
from parsl_freetrain.report.page import live_charts


def charts(view: LiveView, now: float) -> str:
    """Charts of the run as HTML, at ``now`` (epoch seconds); empty if there is no run yet."""
    run = view.snapshot(now).run
    return live_charts(figures(view.reader, run, now, None)) if run else ''
