"""What an allocation maximises: named functions from a trainer's scaling curve to the curve that is summed."""

from __future__ import annotations

from collections.abc import Callable

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import ScalingCurve

Metric = Callable[[ScalingCurve], ScalingCurve]


def throughput(curve: ScalingCurve) -> ScalingCurve:
    """Samples per second: what the curve says."""
    return curve


def speedup(curve: ScalingCurve) -> ScalingCurve:
    """Speed relative to one node, so that trainers of unlike sample sizes compare."""
    one = curve.rate_at(1) or next((r / n for n, r in zip(curve.nodes, curve.rate, strict=True) if r > 0), 1.0)
    return ScalingCurve(curve.nodes, tuple(r / one for r in curve.rate))


METRICS: dict[str, Metric] = {'throughput': throughput, 'speedup': speedup}


def metric_named(name: str) -> Metric:
    """The metric of that name.

    Raises
    ------
    BadInput
        If there is none.
    """
    try:
        return METRICS[name]
    except KeyError:
        known = ', '.join(sorted(METRICS))
        raise BadInput(f'There is no metric {name!r} to allocate nodes by; choose one of {known}.') from None
