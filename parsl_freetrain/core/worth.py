"""How short a hole may be and still be worth a fragment."""

from __future__ import annotations

FLOOR_S = 0.5
"""Seconds that a fragment keeps free before its deadline in any case."""


def shortest_useful_s(start_s: float | None, step_s: float | None, checkpoint_s: float | None, assumed_s: float) -> float:
    """The shortest time on nodes in which a fragment can start, train a global batch and save it.

    What the fragment itself keeps free before its deadline is two checkpoints and a floor, since the one that it writes may take
    longer than the longest so far (see :mod:`parsl_freetrain.training.keeper`); the same is kept here.

    Parameters
    ----------
    start_s
        From the decision to the first step, in seconds: the longest that was measured for this trainer; None: never measured.
    step_s
        One global batch, in seconds, on as many nodes as there would be; None: never measured.
    checkpoint_s
        One checkpoint, in seconds, the longest so far; None: never measured.
    assumed_s
        What a hole must have while nothing, or not everything, has been measured, in seconds.

    Returns
    -------
    float
        Seconds; at least ``assumed_s`` where something is not known, and possibly less where all is.

    Raises
    ------
    ValueError
        If a time is negative or not finite.
    """
    known = [seconds for seconds in (start_s, step_s, checkpoint_s) if seconds is not None]
    if any(not 0 <= seconds < float('inf') for seconds in (*known, assumed_s)):
        raise ValueError(f'{start_s}, {step_s}, {checkpoint_s} and {assumed_s} must be seconds, 0 or more.')
    needed_s = (start_s or 0.0) + (step_s or 0.0) + 2 * (checkpoint_s or 0.0) + FLOOR_S
    return needed_s if len(known) == 3 else max(needed_s, assumed_s)
